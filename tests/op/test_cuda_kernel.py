# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel on the CPU shim: contract, schedules, bad input, counters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from randkv.kv_layout import KVLayout, strided_layout
from randkv.planner import RoundPlan
from randkv.selection import evicted_slots, stream_key
from tests.op.back_ends import ShimCompactor, SlotBySlot, compacted, operator_rounds
from tests.op.cases import random_case
from tests.op.numbered import BLOCK_SIZE, numbered_cache, slots_of


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
