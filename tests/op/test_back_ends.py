# SPDX-License-Identifier: Apache-2.0
"""All back ends leave the same bytes as the planner's moves carried out slot by slot."""

from __future__ import annotations

import pytest
import torch

from tests.op.back_ends import BACK_ENDS, SlotBySlot, compacted
from tests.op.cases import random_case


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("first_seed", "num_cases", "max_budget", "max_heads"),
    [(0, 48, 40, 3), (1000, 24, 500, 4), (2000, 5, 8192, 16)],
    ids=["budgets-to-40", "budgets-to-500", "budgets-to-8192"],
)
def test_random_rounds_leave_the_bytes_of_the_planner(
    back_end: str, first_seed: int, num_cases: int, max_budget: int, max_heads: int
) -> None:
    for seed in range(first_seed, first_seed + num_cases):
        case = random_case(seed, max_budget, max_heads=max_heads)
        expected = case.copy()
        expected_counts = compacted(expected.compactor(SlotBySlot), expected.rounds)
        compactor = case.compactor(BACK_ENDS[back_end])
        for _ in range(1 + (seed % 4 == 0)):  # carrying the rounds out again changes nothing
            assert compacted(compactor, case.rounds) == expected_counts, f"seed {seed}"
            assert torch.equal(case.memory, expected.memory), f"seed {seed}"
