# SPDX-License-Identifier: Apache-2.0
"""The native compactor on a GPU, against the planner's moves carried out slot by slot."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from randkv.compactor import Compactor, PairCounts, make_compactor
from randkv.compactor.cuda import NUM_STAGES, CUDACompactor
from randkv.errors import RandKVCompactorError
from tests.op.back_ends import Rounds, SlotBySlot, compacted, operator_rounds
from tests.op.cases import Case, random_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def native(case: Case) -> Compactor:
    return case.compactor(partial(make_compactor, "native"))


def finished(compactor: Compactor, rounds: Rounds) -> PairCounts:
    """Carry out `rounds`, wait, and take the count."""
    compactor.compact(rounds)
    torch.cuda.synchronize()
    return compactor.take_progress().pairs


@pytest.mark.parametrize(
    ("first_seed", "num_cases", "max_budget"),
    [(0, 60, 40), (1000, 40, 500), (2000, 8, 8192)],
    ids=["budgets-to-40", "budgets-to-500", "budgets-to-8192"],
)
def test_random_rounds_leave_the_bytes_of_the_planner(
    first_seed: int, num_cases: int, max_budget: int
) -> None:
    for seed in range(first_seed, first_seed + num_cases):
        case = random_case(seed, max_budget)
        found = case.copy("cuda")
        expected_counts = compacted(case.compactor(SlotBySlot), case.rounds)
        compactor = native(found)
        assert isinstance(compactor, CUDACompactor)
        for _ in range(2):  # carrying the rounds out again changes nothing
            assert finished(compactor, found.rounds) == expected_counts, f"seed {seed}"
            assert torch.equal(found.memory.cpu(), case.memory), f"seed {seed}"


def test_pytorch_on_the_gpu_leaves_the_same_bytes() -> None:
    for seed in range(20):
        case = random_case(seed, 300)
        found, expected = case.copy("cuda"), case.copy("cuda")
        counts = compacted(expected.compactor(partial(make_compactor, "pytorch")), case.rounds)
        assert finished(native(found), case.rounds) == counts
        assert torch.equal(found.memory, expected.memory), f"seed {seed}"


def test_a_launch_is_ordered_after_what_its_stream_did_before() -> None:
    case = random_case(3, 2000)
    expected = case.copy("cuda")
    finished(native(expected), case.rounds)
    found = case.copy("cuda")
    compactor = native(found)
    content = found.memory.clone()
    found.memory.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found.memory.copy_(content)
        compactor.compact(case.rounds)
    stream.synchronize()
    assert torch.equal(found.memory, expected.memory)


def test_a_launch_neither_waits_nor_allocates() -> None:
    """As often as launches may be on their way; counts and times are told once they are there."""
    case = random_case(4, 500).copy("cuda")
    compactor = native(case)
    once = finished(compactor, case.rounds)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        after_sleep = torch.cuda.Event()
        after_sleep.record()
        for _ in range(NUM_STAGES):
            compactor.compact(case.rounds)
            assert compactor.take_progress() == (PairCounts(0, 0), [])
        assert not after_sleep.query(), "the calls came back after what the stream did before them"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    pairs, seconds = compactor.take_progress()
    assert pairs == PairCounts(NUM_STAGES * once.evicted, NUM_STAGES * once.copied)
    assert seconds is not None
    assert len(seconds) == NUM_STAGES
    assert all(0 < one < 1 for one in seconds)


def test_more_launches_than_stages_wait_and_lose_no_count() -> None:
    case = random_case(4, 500).copy("cuda")
    compactor = native(case)
    once = finished(compactor, case.rounds)
    torch.cuda._sleep(100_000_000)
    for _ in range(3 * NUM_STAGES):
        compactor.compact(case.rounds)
    torch.cuda.synchronize()
    pairs, seconds = compactor.take_progress()
    assert pairs == PairCounts(3 * NUM_STAGES * once.evicted, 3 * NUM_STAGES * once.copied)
    assert seconds is not None
    assert len(seconds) == 3 * NUM_STAGES


def test_bad_blocks_are_an_error_and_nothing_is_written() -> None:
    case = random_case(6, 500)
    found = case.copy("cuda")
    compactor = native(found)
    for bad in (-1, 2**31 - 1, -(2**31)):
        compactor.compact([(plan, [bad] * len(ids)) for plan, ids in case.rounds])
    torch.cuda.synchronize()
    with pytest.raises(RandKVCompactorError, match="outside the KV cache"):
        compactor.take_progress()
    assert torch.equal(found.memory.cpu(), case.memory)


def test_tensors_on_the_cpu_are_refused() -> None:
    case = random_case(6, 50).copy("cuda")
    compactor = native(case)
    assert isinstance(compactor, CUDACompactor)
    packed = torch.cat(
        [torch.from_numpy(part).reshape(-1) for part in operator_rounds(case.rounds)]
    )
    with pytest.raises(RuntimeError, match="is not on the device"):
        compactor._launch(packed, len(case.rounds))


def test_take_progress_does_not_wait() -> None:
    case = random_case(4, 500).copy("cuda")
    compactor = native(case)
    finished(compactor, case.rounds)
    torch.cuda._sleep(2_000_000_000)
    compactor.compact(case.rounds)
    began = time.perf_counter()
    compactor.take_progress()
    assert time.perf_counter() - began < 0.5
    torch.cuda.synchronize()
