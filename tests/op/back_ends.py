# SPDX-License-Identifier: Apache-2.0
"""Every compactor back end that runs without a GPU, behind one signature, to compare them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from randkv.compactor import Compactor, PairCounts, Progress, make_compactor
from randkv.compactor.native import ROUND_FIELDS, layout_numbers, pack_rounds
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


def operator_rounds(rounds: Rounds) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The operator's `rounds` and `block_ids` (see csrc/round.h)."""
    packed = pack_rounds(rounds)
    split = ROUND_FIELDS * len(rounds)
    return packed[:split].reshape(-1, ROUND_FIELDS), packed[split:]


def compacted(compactor: Compactor, rounds: Rounds) -> PairCounts:
    """Carry out `rounds`; the compactor's own count of what it did."""
    compactor.compact(rounds)
    return compactor.take_progress().pairs


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
        self._pairs = PairCounts(0, 0)

    def compact(self, rounds: Rounds) -> None:
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
        self._pairs = PairCounts(self._pairs[0] + num_evicted, self._pairs[1] + num_copied)

    def take_progress(self) -> Progress:
        pairs, self._pairs = self._pairs, PairCounts(0, 0)
        return Progress(pairs)

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
        self._layout = layout_numbers(layout).numpy()
        self._layers = np.asarray(layers, np.int32)
        self._first_kv_head = first_kv_head
        self._manager_block_size = manager_block_size
        self._grid_size = grid_size
        self.seed = seed
        self.counters = np.zeros(3, np.int64)
        self._told = self.counters.copy()

    def compact(self, rounds: Rounds) -> None:
        self.compact_rows(*operator_rounds(rounds))

    def take_progress(self) -> Progress:
        evicted, copied, _ = (self.counters - self._told).tolist()
        self._told = self.counters.copy()
        return Progress(PairCounts(evicted, copied))

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


BACK_ENDS: dict[str, Callable[..., Compactor]] = {
    "pytorch": partial(make_compactor, "pytorch"),
    "native-cpu": partial(make_compactor, "native"),
    "cuda-shim": ShimCompactor,
}
