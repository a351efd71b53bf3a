# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from randkv import RandKVConfig, RandKVConfigError
from randkv.planner import (
    NO_MOVE,
    Round,
    RoundPlan,
    first_due,
    is_due,
    next_due,
    plan_moves,
    replay,
)
from randkv.selection import stream_key

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "selection_vectors.json").read_text())


@st.composite
def cases(draw: st.DrawFn) -> tuple[RandKVConfig, int, int]:
    """A config, a prompt length and a number of tokens long enough for a few rounds."""
    budget = draw(st.integers(1, 40))
    config = RandKVConfig(budget, draw(st.integers(0, 12)), draw(st.integers(0, 2**64 - 1)))
    prompt_len = draw(st.integers(1, budget))
    num_tokens = first_due(config) + draw(st.integers(0, 6)) * config.round_interval
    return config, prompt_len, num_tokens


def run(config: RandKVConfig, prompt_len: int, num_tokens: int) -> list[Round]:
    return replay(
        config,
        request_key="law",
        prompt_len=prompt_len,
        num_tokens=num_tokens,
        num_layers=2,
        num_kv_heads=3,
    )


@pytest.mark.parametrize("vector", VECTORS["replay"], ids=lambda v: v["input"]["request_key"])
def test_replay_known_answers(vector: dict[str, Any]) -> None:
    arguments = dict(vector["input"])
    config = RandKVConfig(*(arguments.pop(name) for name in ("budget", "buffer_size", "seed")))
    rounds = replay(config, **arguments)
    assert [r.computed_tokens for r in rounds] == [r["computed_tokens"] for r in vector["rounds"]]
    for found, expected in zip(rounds, vector["rounds"], strict=True):
        assert found.evicted_positions.tolist() == expected["evicted_positions"]
        moves = [
            [[move for move in head if move[0] != NO_MOVE] for head in layer]
            for layer in found.moves.tolist()
        ]
        assert moves == expected["moves"]


@given(cases())
def test_prompt_and_newest_never_leave_and_nothing_is_lost_twice(
    case: tuple[RandKVConfig, int, int],
) -> None:
    config, prompt_len, _ = case
    gone: list[set[int]] = [set() for _ in range(6)]
    for done in run(*case):
        n = config.compacted_len
        assert done.positions.shape == done.source_offsets.shape == (2, 3, n)
        kept = done.positions.reshape(6, n)
        evicted = done.evicted_positions.reshape(6, -1)
        assert (np.diff(evicted, axis=1) > 0).all()
        for head in range(6):
            now = set(evicted[head].tolist())
            left = set(kept[head].tolist())
            assert not now & gone[head]
            gone[head] |= now
            assert left | gone[head] == set(range(done.computed_tokens))
            assert len(left) + len(gone[head]) == done.computed_tokens
            assert set(range(prompt_len)) <= left
            newest = range(done.computed_tokens - config.buffer_size, done.computed_tokens)
            assert set(newest) <= left
            assert kept[head, :prompt_len].tolist() == list(range(prompt_len))


@given(cases())
def test_moves_fill_every_hole_from_above(case: tuple[RandKVConfig, int, int]) -> None:
    config = case[0]
    n = config.compacted_len
    for done in run(*case):
        old_len = n + done.evicted_positions.shape[2]
        for moves, offsets in zip(
            done.moves.reshape(6, -1, 2), done.source_offsets.reshape(6, n), strict=True
        ):
            real = moves[moves[:, 0] != NO_MOVE]
            sources, holes = real[:, 0], real[:, 1]
            assert len(real) <= old_len - n
            assert (np.diff(sources) > 0).all()
            assert (np.diff(holes) > 0).all()
            assert (sources >= n).all()
            assert (sources < old_len).all()
            assert (holes < n).all()
            assert (holes >= case[1]).all()
            expected = np.arange(n)
            expected[holes] = sources
            assert offsets.tolist() == expected.tolist()


@given(cases())
def test_applying_a_plan_twice_equals_once(case: tuple[RandKVConfig, int, int]) -> None:
    for done in run(*case):
        before = np.arange(done.computed_tokens + 100)
        for moves in done.moves.reshape(6, -1, 2):
            real = moves[moves[:, 0] != NO_MOVE]
            once = before.copy()
            once[real[:, 1]] = once[real[:, 0]]
            twice = once.copy()
            twice[real[:, 1]] = twice[real[:, 0]]
            assert twice.tolist() == once.tolist()


@given(cases())
def test_a_steady_round_copies_one_pair_per_evicted_pair(
    case: tuple[RandKVConfig, int, int],
) -> None:
    config = case[0]
    for done in run(*case)[1:]:
        if config.buffer_size:
            assert done.moves.shape[2] == done.evicted_positions.shape[2] == config.buffer_size
            assert (done.moves != NO_MOVE).all()


@given(cases(), st.integers(0, 400))
def test_due_counts_do_not_depend_on_history(
    case: tuple[RandKVConfig, int, int], computed: int
) -> None:
    config, prompt_len, num_tokens = case
    due = [r.computed_tokens for r in run(config, prompt_len, num_tokens)]
    assert due[0] == config.compacted_len + 1
    assert next_due(config, computed) > computed
    walked, at = [], 0
    while (at := next_due(config, at)) <= num_tokens:
        walked.append(at)
    assert walked == due


@given(cases())
def test_decoding_token_by_token_is_due_exactly_there(case: tuple[RandKVConfig, int, int]) -> None:
    config, prompt_len, num_tokens = case
    evicted, due, longest = 0, [], 0
    for computed in range(prompt_len, num_tokens + 1):
        longest = max(longest, computed - evicted)
        if is_due(config, computed, evicted):
            due.append(computed)
            evicted = computed - config.compacted_len
    assert due == [r.computed_tokens for r in run(config, prompt_len, num_tokens)]
    assert longest <= config.max_physical_len


def test_prompt_longer_than_the_budget_is_refused() -> None:
    with pytest.raises(RandKVConfigError, match="prompt_len has value 9"):
        run(RandKVConfig(budget=8), 9, 100)


def test_no_round_before_the_first_is_due() -> None:
    config = RandKVConfig(budget=8, buffer_size=4)
    assert run(config, 3, 12) == []
    assert len(run(config, 3, 13)) == 1


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_rank_sees_the_same_moves_as_the_whole(
    num_layers: int, num_kv_heads: int, data: st.DataObject
) -> None:
    first_layer = data.draw(st.integers(0, num_layers - 1))
    first_head = data.draw(st.integers(0, num_kv_heads - 1))
    plan = RoundPlan("r", 3, stream_key("k", 1), 4, 40, 32, 8, num_blocks=2)
    whole = plan.evicted_slots(np.arange(num_layers), np.arange(num_kv_heads))
    part = plan.evicted_slots(
        np.arange(first_layer, num_layers), np.arange(first_head, num_kv_heads)
    )
    assert part.tolist() == whole[first_layer:, first_head:].tolist()
    moves = plan_moves(part, 40, 32)
    assert len(moves.hole) == part.size
