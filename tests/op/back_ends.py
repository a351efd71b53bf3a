# SPDX-License-Identifier: Apache-2.0
"""Every compactor back end that runs without a GPU, behind one signature, to compare them."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from randkv.compactor import Compactor, PairCounts
from randkv.compactor.pytorch import PyTorchCompactor
from randkv.kv_layout import KVLayout
from randkv.planner import RoundPlan, plan_moves

REPOSITORY = Path(__file__).parents[2]
BUILD = REPOSITORY / "build" / "csrc"
Rounds = Sequence[tuple[RoundPlan, Sequence[int]]]


def make(target: str, *arguments: str) -> None:
    """Build `target` of csrc/Makefile; a test fails with the compiler's words if that fails."""
    done = subprocess.run(
        ["make", "-C", str(REPOSITORY / "csrc"), "-j2", target, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def skip_or_fail(reason: str) -> None:
    """Skip, except in .ci/run, where what is missing was to be installed."""
    if os.environ.get("RANDKV_NO_SKIPS"):
        pytest.fail(f"RANDKV_NO_SKIPS is set, but {reason}")
    pytest.skip(reason)


def operator_rounds(rounds: Rounds) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The operator's `rounds` and `block_ids` (see csrc/round.h)."""
    rows, block_ids = np.zeros((len(rounds), 8), np.uint32), list[int]()
    for row, (plan, ids) in zip(rows, rounds, strict=True):
        stop_slot = plan.old_len - plan.buffer_size
        lengths = plan.prompt_len, stop_slot, plan.old_len, plan.new_len
        row[:] = *plan.key, plan.round_index, *lengths, len(block_ids)
        block_ids += ids
    return rows.view(np.int32), np.array(block_ids, np.int32)


def operator_layout(layout: KVLayout) -> NDArray[np.int64]:
    """The operator's `layout` (see csrc/schema.h)."""
    sizes = layout.block_size, layout.num_kv_heads, layout.head_size
    strides = layout.block_stride, layout.head_stride
    slots = layout.key_slot_offsets, layout.value_slot_offsets
    return np.concatenate(
        [sizes, strides, *slots, layout.key_dim_offsets, layout.value_dim_offsets]
    )


class SlotBySlot:
    """The planner's moves carried out one by one on the tensor as the engine sees it."""

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        layers: Sequence[int],
        first_kv_head: int,
        manager_block_size: int,
    ) -> None:
        self._caches = [c.view(torch.uint8) if c.element_size() == 1 else c for c in kv_caches]
        self._block_size = layout.block_size
        self._layers = np.asarray(layers)
        self._heads = np.arange(first_kv_head, first_kv_head + layout.num_kv_heads)
        self._blocks_per_id = manager_block_size // layout.block_size

    def compact(self, rounds: Rounds) -> PairCounts:
        num_evicted = num_copied = 0
        for plan, block_ids in rounds:
            evicted = plan.evicted_slots(self._layers, self._heads)
            num_evicted += evicted.size
            for move in zip(*plan_moves(evicted, plan.old_len, plan.new_len), strict=True):
                layer, head, source, hole = map(int, move)
                cache = self._caches[layer]
                source_block, source_offset = self._place(source, block_ids)
                hole_block, hole_offset = self._place(hole, block_ids)
                cache[hole_block, head, hole_offset] = cache[source_block, head, source_offset]
                num_copied += 1
        return PairCounts(num_evicted, num_copied)

    def _place(self, slot: int, block_ids: Sequence[int]) -> tuple[int, int]:
        block, offset = divmod(slot, self._block_size)
        index, part = divmod(block, self._blocks_per_id)
        return block_ids[index] * self._blocks_per_id + part, offset


@cache
def shim_library() -> ctypes.CDLL:
    make("shim")
    library = ctypes.CDLL(str(BUILD / "libcompact_shim.so"))
    library.randkv_compact.restype = ctypes.c_char_p
    return library


class ShimCompactor:
    """The CUDA kernel on csrc/shim; `seed` picks the schedule and the garbage in shared memory."""

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        layers: Sequence[int],
        first_kv_head: int,
        manager_block_size: int,
        grid_size: int = 3,
        seed: int = 0,
    ) -> None:
        self._caches = kv_caches
        self._layout = operator_layout(layout)
        self._layers = np.asarray(layers, np.int32)
        self._first_kv_head = first_kv_head
        self._manager_block_size = manager_block_size
        self._grid_size = grid_size
        self.seed = seed
        self.counters = np.zeros(3, np.int64)

    def compact(self, rounds: Rounds) -> PairCounts:
        before = self.counters.copy()
        self.compact_rows(*operator_rounds(rounds))
        return PairCounts(*(self.counters - before)[:2].tolist())

    def compact_rows(self, rows: NDArray[np.int32], block_ids: NDArray[np.int32]) -> None:
        first = self._caches[0]
        pointers = (ctypes.c_void_p * len(self._caches))(*[c.data_ptr() for c in self._caches])
        error = shim_library().randkv_compact(
            pointers,
            ctypes.c_int64(len(self._caches)),
            (ctypes.c_int64 * 4)(*first.shape),
            (ctypes.c_int64 * 4)(*first.stride()),
            ctypes.c_int64(first.element_size()),
            rows.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(rows)),
            block_ids.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(block_ids)),
            self._layers.ctypes.data_as(ctypes.c_void_p),
            self._layout.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(len(self._layout)),
            ctypes.c_int64(self._first_kv_head),
            ctypes.c_int64(self._manager_block_size),
            self.counters.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_uint(self._grid_size),
            ctypes.c_uint64(self.seed),
        )
        if error:
            raise RuntimeError(error.decode())


@cache
def cuda_operator() -> Callable[..., None]:
    """`randkv::compact` with its CUDA kernel; the library is built if it is not there."""
    if not (BUILD / "librandkv_cuda.so").exists():
        make("cuda")
    if not hasattr(torch.ops.randkv, "compact"):  # the CPU library, which defines it, is not loaded
        header = (REPOSITORY / "csrc" / "schema.h").read_text()
        schema = "".join(re.findall(r'"(.*)"', header)).removeprefix("compact")
        torch.library.define("randkv::compact", schema)
    torch.ops.load_library(BUILD / "librandkv_cuda.so")
    return torch.ops.randkv.compact  # type: ignore[no-any-return]


class CudaCompactor:
    """The CUDA kernel on a GPU."""

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        layers: Sequence[int],
        first_kv_head: int,
        manager_block_size: int,
    ) -> None:
        self._caches = list(kv_caches)
        self._device = kv_caches[0].device
        self._layout = torch.from_numpy(operator_layout(layout))
        self._layers = torch.tensor(layers, dtype=torch.int32, device=self._device)
        self._first_kv_head = first_kv_head
        self._manager_block_size = manager_block_size
        self._workspace = torch.zeros(0, dtype=torch.int32, device=self._device)
        self.counters = torch.zeros(3, dtype=torch.int64, device=self._device)

    def compact(self, rounds: Rounds) -> PairCounts:
        before = self.counters.clone()
        self.enqueue(*self.on_device(rounds))
        return PairCounts(*(self.counters - before)[:2].tolist())

    def on_device(self, rounds: Rounds) -> tuple[torch.Tensor, torch.Tensor]:
        rows, block_ids = operator_rounds(rounds)
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(block_ids).to(self._device)

    def enqueue(self, rows: torch.Tensor, block_ids: torch.Tensor) -> None:
        cuda_operator()(
            self._caches,
            rows,
            block_ids,
            self._layers,
            self._layout,
            self._first_kv_head,
            self._manager_block_size,
            self._workspace,
            self.counters,
        )


BACK_ENDS: dict[str, Callable[..., Compactor]] = {
    "pytorch": PyTorchCompactor,
    "cuda-shim": ShimCompactor,
}
