# SPDX-License-Identifier: Apache-2.0
"""Every back end gives the known answers of selection contract v1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randkv.compactor import Compactor
from randkv.kv_layout import strided_layout
from randkv.planner import RoundPlan
from randkv.selection import StreamKey, evicted_slots, priorities, stream_key
from tests.op.back_ends import BACK_ENDS, compacted
from tests.op.numbered import BLOCK_SIZE, numbered_cache, slots_of

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "selection_vectors.json").read_text())


def compactor_of(back_end: str, cache: torch.Tensor, *, layer: int, kv_head: int = 0) -> Compactor:
    return BACK_ENDS[back_end](
        [cache],
        strided_layout(cache),
        layers=[layer],
        first_kv_head=kv_head,
        manager_block_size=BLOCK_SIZE,
    )


def selected(
    back_end: str,
    key: StreamKey,
    round_index: int,
    layer: int,
    kv_head: int,
    first_slot: int,
    stop_slot: int,
    num_evict: int,
) -> list[int]:
    """Slots that a back end evicts, seen by what is moved into them.

    The buffer is as long as the eviction, so all evicted slots are holes, and the sources are
    the buffer.
    """
    old_len = stop_slot + num_evict
    cache = numbered_cache(old_len)
    plan = RoundPlan("a", round_index, key, first_slot, old_len, stop_slot, num_evict, num_blocks=0)
    compactor = compactor_of(back_end, cache, layer=layer, kv_head=kv_head)
    counts = compacted(compactor, [(plan, range(len(cache)))])
    assert counts == (num_evict, num_evict)
    found = slots_of(cache)
    changed = np.flatnonzero(found != np.arange(len(found)))
    assert found[changed].tolist() == list(range(stop_slot, old_len))
    return changed.tolist()


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("vector", VECTORS["select"], ids=lambda v: v["input"]["request_key"][:12])
def test_selects_the_known_answers(vector: dict[str, Any], back_end: str) -> None:
    given = dict(vector["input"])
    key = stream_key(given.pop("request_key"), given.pop("seed"))
    assert selected(back_end, key, **given) == vector["evicted_slots"]


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("vector", VECTORS["replay"], ids=lambda v: v["input"]["request_key"][:12])
def test_replays_the_known_rounds(vector: dict[str, Any], back_end: str) -> None:
    """One cache through all rounds of a request, holding positions, in one layer per launch."""
    given = vector["input"]
    budget, buffer_size = given["budget"], given["buffer_size"]
    new_len = budget + buffer_size
    heads = given["num_kv_heads"]
    for layer in range(given["num_layers"]):
        cache = numbered_cache(new_len + 2 * buffer_size + 2, heads)
        compactor = compactor_of(back_end, cache, layer=layer)
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


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_of_slots_with_one_priority_the_lower_is_evicted(back_end: str) -> None:
    num_slots = 60_000
    key, num_evict = keys_with_a_tie(num_slots)
    expected = evicted_slots(key, 0, 0, 0, 0, num_slots, num_evict)
    assert selected(back_end, key, 0, 0, 0, 0, num_slots, num_evict) == expected.tolist()


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_head_that_draws_no_low_priority_evicts_its_lowest(back_end: str) -> None:
    """One head in ten thousand: the CPU kernel looks at low priorities first, and finds none."""
    key, layer, kv_head, num_slots = StreamKey(1, 2), 309, 20, 2000
    found = priorities(key, 0, np.array([layer]), np.array([kv_head]), 0, num_slots)[0, 0]
    assert found.min() > 9 / num_slots * 2**32  # csrc/cpu/selection.h: 1 + 4 * sqrt(1) + 4
    assert selected(back_end, key, 0, layer, kv_head, 0, num_slots, 1) == [int(found.argmin())]
