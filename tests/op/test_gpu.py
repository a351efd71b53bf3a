# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel on a GPU, against the planner's moves carried out slot by slot."""

from __future__ import annotations

import pytest
import torch

from randkv.compactor.pytorch import PyTorchCompactor
from tests.op.back_ends import CudaCompactor, SlotBySlot
from tests.op.cases import random_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


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
        expected_counts = case.compactor(SlotBySlot).compact(case.rounds)
        compactor = found.compactor(CudaCompactor)
        for _ in range(2):  # carrying the rounds out again changes nothing
            assert compactor.compact(found.rounds) == expected_counts, f"seed {seed}"
            assert torch.equal(found.memory.cpu(), case.memory), f"seed {seed}"


def test_pytorch_on_the_gpu_leaves_the_same_bytes() -> None:
    for seed in range(20):
        case = random_case(seed, 300)
        found, expected = case.copy("cuda"), case.copy("cuda")
        counts = expected.compactor(PyTorchCompactor).compact(case.rounds)
        assert found.compactor(CudaCompactor).compact(case.rounds) == counts
        assert torch.equal(found.memory, expected.memory), f"seed {seed}"


def test_a_launch_is_ordered_after_what_its_stream_did_before() -> None:
    case = random_case(3, 2000)
    expected = case.copy("cuda")
    expected.compactor(CudaCompactor).compact(case.rounds)
    found = case.copy("cuda")
    compactor = found.compactor(CudaCompactor)
    assert isinstance(compactor, CudaCompactor)
    arguments = compactor.on_device(case.rounds)
    content = found.memory.clone()
    found.memory.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found.memory.copy_(content)
        compactor.enqueue(*arguments)
    stream.synchronize()
    assert torch.equal(found.memory, expected.memory)


def test_a_launch_neither_waits_nor_allocates() -> None:
    case = random_case(4, 500).copy("cuda")
    compactor = case.compactor(CudaCompactor)
    assert isinstance(compactor, CudaCompactor)
    arguments = compactor.on_device(case.rounds)
    compactor.enqueue(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        after_sleep = torch.cuda.Event()
        after_sleep.record()
        compactor.enqueue(*arguments)
        assert not after_sleep.query(), "the call came back after what the stream did before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_bad_blocks_are_counted_and_nothing_else_is_written() -> None:
    case = random_case(6, 500)
    found = case.copy("cuda")
    compactor = found.compactor(CudaCompactor)
    assert isinstance(compactor, CudaCompactor)
    rows, block_ids = compactor.on_device(case.rounds)
    for bad in (-1, 2**31 - 1, -(2**31)):
        compactor.enqueue(rows, torch.full_like(block_ids, bad))
    counters = compactor.counters.tolist()
    assert counters[1] == 0
    assert counters[2] > 0
    assert torch.equal(found.memory.cpu(), case.memory)


def test_tensors_on_the_cpu_are_refused() -> None:
    case = random_case(6, 50).copy("cuda")
    compactor = case.compactor(CudaCompactor)
    assert isinstance(compactor, CudaCompactor)
    rows, block_ids = compactor.on_device(case.rounds)
    with pytest.raises(RuntimeError, match="block_ids is not on the device"):
        compactor.enqueue(rows, block_ids.cpu())
