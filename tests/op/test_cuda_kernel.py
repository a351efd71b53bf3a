# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel on the CPU shim: contract, schedules, bad input, counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randkv.kv_layout import KVLayout, strided_layout
from randkv.planner import RoundPlan
from randkv.selection import StreamKey, evicted_slots, priorities, stream_key
from tests.op.back_ends import ShimCompactor, SlotBySlot, compacted, operator_rounds
from tests.op.cases import random_case

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "selection_vectors.json").read_text())
BLOCK_SIZE = 16


def numbered_cache(num_slots: int, num_kv_heads: int = 1) -> torch.Tensor:
    """float32 cache of head size 1 whose slots hold their own number, in block order."""
    num_blocks = -(-num_slots // BLOCK_SIZE)
    numbers = torch.arange(num_blocks * BLOCK_SIZE, dtype=torch.float32)
    numbers = numbers.view(num_blocks, 1, BLOCK_SIZE, 1)
    return numbers.expand(num_blocks, num_kv_heads, BLOCK_SIZE, 2).clone()


def slots_of(cache: torch.Tensor, kv_head: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What each slot of a cache in block order holds."""
    return cache[:, kv_head, :, 0].reshape(-1).numpy().astype(np.int64)


def compactor_of(
    caches: list[torch.Tensor], *, layers: list[int], first_kv_head: int = 0, seed: int = 0
) -> ShimCompactor:
    return ShimCompactor(
        caches,
        strided_layout(caches[0]),
        layers=layers,
        first_kv_head=first_kv_head,
        manager_block_size=BLOCK_SIZE,
        seed=seed,
    )


def selected(
    key: StreamKey,
    round_index: int,
    layer: int,
    kv_head: int,
    first_slot: int,
    stop_slot: int,
    num_evict: int,
) -> list[int]:
    """Slots that the kernel evicts, seen by what is moved into them.

    The buffer is as long as the eviction, so all evicted slots are holes, and the sources are
    the buffer.
    """
    old_len = stop_slot + num_evict
    cache = numbered_cache(old_len)
    plan = RoundPlan("a", round_index, key, first_slot, old_len, stop_slot, num_evict, num_blocks=0)
    compactor = compactor_of([cache], layers=[layer], first_kv_head=kv_head)
    counts = compacted(compactor, [(plan, range(len(cache)))])
    assert counts == (num_evict, num_evict)
    found = slots_of(cache)
    changed = np.flatnonzero(found != np.arange(len(found)))
    assert found[changed].tolist() == list(range(stop_slot, old_len))
    return changed.tolist()


@pytest.mark.parametrize("vector", VECTORS["select"], ids=lambda v: v["input"]["request_key"][:12])
def test_selects_the_known_answers(vector: dict[str, Any]) -> None:
    given = dict(vector["input"])
    key = stream_key(given.pop("request_key"), given.pop("seed"))
    assert selected(key, **given) == vector["evicted_slots"]


@pytest.mark.parametrize("vector", VECTORS["replay"], ids=lambda v: v["input"]["request_key"][:12])
def test_replays_the_known_rounds(vector: dict[str, Any]) -> None:
    """One cache through all rounds of a request, holding positions, in one layer per launch."""
    given = vector["input"]
    budget, buffer_size = given["budget"], given["buffer_size"]
    new_len = budget + buffer_size
    heads = given["num_kv_heads"]
    for layer in range(given["num_layers"]):
        cache = numbered_cache(new_len + 2 * buffer_size + 2, heads)
        compactor = compactor_of([cache], layers=[layer])
        computed = old_len = 0
        for index, round_ in enumerate(vector["rounds"]):
            appended = round_["computed_tokens"] - computed
            slots = torch.arange(old_len, old_len + appended)
            positions = torch.arange(computed, computed + appended).float()
            cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = positions[:, None, None]
            old_len += appended
            computed = round_["computed_tokens"]
            before = [slots_of(cache, head)[:old_len] for head in range(heads)]
            plan = RoundPlan(
                "a",
                index,
                StreamKey(*vector["stream_key"]),
                given["prompt_len"],
                old_len,
                new_len,
                buffer_size,
                num_blocks=0,
            )
            compactor.compact([(plan, range(len(cache)))])
            for head in range(heads):
                after = slots_of(cache, head)[:new_len]
                evicted = round_["evicted_positions"][layer][head]
                assert sorted(set(before[head]) - set(after)) == evicted
                expected = before[head][:new_len].copy()
                for source, hole in round_["moves"][layer][head]:
                    expected[hole] = before[head][source]
                assert after.tolist() == expected.tolist()
            old_len = new_len


def keys_with_a_tie(num_slots: int) -> tuple[StreamKey, int]:
    """A key, and how many to evict so that of two slots with one priority only one is."""
    for number in range(100):
        key = StreamKey(number, 0)
        found = priorities(key, 0, np.array([0]), np.array([0]), 0, num_slots)[0, 0]
        ordered = np.sort(found)
        ties = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(ties):
            return key, int(ties[0]) + 1
    raise AssertionError("no tie in 100 keys")


def test_of_slots_with_one_priority_the_lower_is_evicted() -> None:
    num_slots = 60_000
    key, num_evict = keys_with_a_tie(num_slots)
    expected = evicted_slots(key, 0, 0, 0, 0, num_slots, num_evict)
    assert selected(key, 0, 0, 0, 0, num_slots, num_evict) == expected.tolist()


def test_every_schedule_gives_the_same_bytes() -> None:
    case = random_case(7, 200, max_heads=2)
    expected = case.copy()
    expected.compactor(SlotBySlot).compact(expected.rounds)
    for seed in range(16):
        found = case.copy()
        found.compactor(ShimCompactor, seed=seed, grid_size=1 + seed % 5).compact(found.rounds)
        assert torch.equal(found.memory, expected.memory), f"schedule {seed}"


def test_counters_are_added_to() -> None:
    case = random_case(11, 60)
    compactor = case.compactor(ShimCompactor)
    assert isinstance(compactor, ShimCompactor)
    once = compacted(compactor, case.rounds)
    compactor.compact(case.rounds)
    assert compactor.counters.tolist() == [2 * once.evicted, 2 * once.copied, 0]


def test_no_rounds_change_nothing() -> None:
    cache = numbered_cache(64)
    before = cache.clone()
    compactor = compactor_of([cache], layers=[0])
    compactor.compact_rows(np.zeros((0, 8), np.int32), np.zeros(0, np.int32))
    assert torch.equal(cache, before)
    assert not compactor.counters.any()


PLAN = RoundPlan("a", 3, stream_key("bad", 1), 5, 96, 64, 32, num_blocks=0)
"""32 of the slots 5 to 63 are evicted: sources are blocks 4 and 5, holes are in blocks 0 to 3."""


@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1, -(2**31)], ids=["-1", "6", "max", "min"])
@pytest.mark.parametrize("index", [0, 3, 4], ids=["of-holes", "of-other-holes", "of-sources"])
def test_moves_with_a_bad_block_are_skipped_and_counted(bad: int, index: int) -> None:
    cache = numbered_cache(96)
    holes = evicted_slots(PLAN.key, 3, 9, 0, 5, 64, 32)
    sources = np.arange(64, 96)
    is_bad = (holes // BLOCK_SIZE == index) | (sources // BLOCK_SIZE == index)
    expected = np.arange(96)
    expected[holes[~is_bad]] = sources[~is_bad]
    compactor = compactor_of([cache], layers=[9])
    block_ids = list(range(6))
    block_ids[index] = bad
    counts = compacted(compactor, [(PLAN, block_ids)])
    assert slots_of(cache).tolist() == expected.tolist()
    assert counts == (32, 32 - is_bad.sum())
    assert compactor.counters[2] == is_bad.sum() > 0


@pytest.mark.parametrize("first_block", [-7, 6, 2**31 - 1])
def test_indices_beyond_the_block_ids_are_not_read(first_block: int) -> None:
    cache = numbered_cache(96)
    before = cache.clone()
    rows, block_ids = operator_rounds([(PLAN, range(6))])
    rows[0, 7] = first_block
    compactor = compactor_of([cache], layers=[9])
    compactor.compact_rows(rows, block_ids)
    assert torch.equal(cache, before)
    assert compactor.counters.tolist() == [32, 0, 32]


@pytest.mark.parametrize(
    ("column", "value"),
    [(3, -1), (3, 97), (4, 4), (4, 97), (5, 2**31 - 1), (6, 4), (6, 97), (6, 30)],
)
def test_rounds_that_are_none_are_refused_and_counted(column: int, value: int) -> None:
    cache = numbered_cache(96)
    before = cache.clone()
    good, block_ids = operator_rounds([(PLAN, range(6))])
    bad = good.copy()
    bad[0, column] = value
    compactor = compactor_of([cache], layers=[9])
    compactor.compact_rows(bad, block_ids)
    assert torch.equal(cache, before)
    assert compactor.counters.tolist() == [0, 0, 1]
    compactor.compact_rows(np.concatenate([bad, good]), block_ids)
    assert compactor.counters.tolist() == [32, 32, 2]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("block_size", 1, r"layout has \d+ entries"),
        ("num_kv_heads", 1, r"layout\[1\] is 2, but kv_caches says 1"),
        ("block_stride", 1, r"layout\[3\] is 33, but kv_caches says 32"),
        ("head_stride", -1, r"layout\[4\] is"),
        ("key_slot_offsets", 1, "not that of the strides"),
        ("value_dim_offsets", 2, "not that of the strides"),
    ],
)
def test_a_layout_that_is_not_the_strides_is_refused(field: str, change: int, message: str) -> None:
    cache = numbered_cache(96)
    layout = strided_layout(cache)
    fields = {name: getattr(layout, name) for name in KVLayout.__dataclass_fields__}
    fields[field] = fields[field] + change
    if field == "block_size":
        fields["key_slot_offsets"] = np.arange(17)
    other = KVLayout(**fields)
    compactor = ShimCompactor(
        [cache], other, layers=[0], first_kv_head=0, manager_block_size=BLOCK_SIZE
    )
    with pytest.raises(RuntimeError, match=message):
        compactor.compact([(PLAN, range(6))])


@pytest.mark.parametrize("manager_block_size", [0, 8, 24, -16])
def test_a_manager_block_that_is_not_whole_blocks_is_refused(manager_block_size: int) -> None:
    cache = numbered_cache(96)
    layout = strided_layout(cache)
    compactor = ShimCompactor(
        [cache], layout, layers=[0], first_kv_head=0, manager_block_size=manager_block_size
    )
    with pytest.raises(RuntimeError, match=f"manager_block_size is {manager_block_size}"):
        compactor.compact([(PLAN, range(6))])


def test_elements_of_a_slot_that_are_apart_are_refused() -> None:
    cache = torch.zeros(6, 1, BLOCK_SIZE, 4)[..., ::2]
    with pytest.raises(RuntimeError, match="side by side"):
        compactor_of([cache], layers=[0]).compact([(PLAN, range(6))])
