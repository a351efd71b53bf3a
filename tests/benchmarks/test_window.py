# SPDX-License-Identifier: Apache-2.0
"""The control arm holds the prompt and the newest tokens, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.window import WindowPlan
from randkv.config import RandKVConfig
from randkv.planner import first_due, next_due, plan_moves
from randkv.selection import StreamKey


@pytest.mark.parametrize(
    ("prompt_len", "budget", "buffer_size"),
    [(5, 16, 4), (5, 17, 4), (1, 40, 7), (16, 16, 4), (3, 16, 0), (3, 16, 1)],
)
def test_window_holds_the_prompt_and_the_newest_tokens(
    prompt_len: int, budget: int, buffer_size: int
) -> None:
    config = RandKVConfig(budget, buffer_size)
    new_len = config.compacted_len
    computed = first_due(config)
    positions = np.arange(computed)  # by slot
    for round_index in range(40):
        plan = WindowPlan(
            *("r", round_index, StreamKey(1, 2)),
            *(prompt_len, len(positions), new_len, buffer_size, 1),
        )
        evicted = plan.evicted_slots(np.arange(2), np.arange(3))
        assert (evicted == evicted[0, 0]).all()
        moves = plan_moves(evicted[:1, :1], plan.old_len, plan.new_len)
        positions[moves.hole] = positions[moves.source]
        newest = range(computed - (new_len - prompt_len), computed)
        assert sorted(positions[:new_len]) == [*range(prompt_len), *newest]
        due = next_due(config, computed)
        positions = np.append(positions[:new_len], np.arange(computed, due))
        computed = due
