# SPDX-License-Identifier: Apache-2.0
"""The compiled operator ``randkv::compact``: loading it, its arguments, and the CPU compactor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from randkv.compactor.base import PairCounts, Progress
from randkv.errors import RandKVCompactorError
from randkv.kv_layout import KVLayout
from randkv.planner import RoundPlan

LIBRARIES = Path(__file__).parent / "lib"
"""Where ``make -C csrc`` puts librandkv_cpu.so, which has the schema, and librandkv_cuda.so."""

ROUND_FIELDS = 8
"""Entries of a row of the operator's `rounds`; csrc/round.h says which."""

_loaded: set[str] = set()


def load(device_type: str) -> None:
    """Load the operator's schema, and its kernel for `device_type` ("cpu" or "cuda"), once.

    Raises:
        RandKVCompactorError: A library is missing or does not load.
    """
    for name in dict.fromkeys(("cpu", device_type)):
        if name in _loaded:
            continue
        path = LIBRARIES / f"librandkv_{name}.so"
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise RandKVCompactorError(
                f"the native compactor {path} cannot be loaded: {error}. Build it with "
                f"`make -C csrc {name}`, or choose --kv-cache-compactor pytorch."
            ) from None
        if name == "cpu":
            torch.library.register_fake("randkv::compact", _fake_compact)
        _loaded.add(name)


def _fake_compact(*_: object) -> None:
    """The operator has no result; what it mutates is in its schema."""


def layout_numbers(layout: KVLayout) -> torch.Tensor:
    """The operator's `layout`: int64 ``[5 + 2 * block_size + 2 * head_size]``, on the CPU."""
    sizes = [
        layout.block_size,
        layout.num_kv_heads,
        layout.head_size,
        layout.block_stride,
        layout.head_stride,
    ]
    return torch.from_numpy(
        np.concatenate(
            [
                np.asarray(sizes, np.int64),
                layout.key_slot_offsets,
                layout.value_slot_offsets,
                layout.key_dim_offsets,
                layout.value_dim_offsets,
            ]
        )
    )


def pack_rounds(rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> NDArray[np.int32]:
    """The operator's `rounds` and then its `block_ids`, in one flat array."""
    rows, block_ids = [], []
    first_block = 0
    for plan, ids in rounds:
        rows.append(
            (
                *plan.key,
                plan.round_index,
                plan.prompt_len,
                plan.old_len - plan.buffer_size,
                plan.old_len,
                plan.new_len,
                first_block,
            )
        )
        block_ids.append(np.asarray(ids, np.int32))
        first_block += len(ids)
    return np.concatenate([np.array(rows, np.uint32).view(np.int32).reshape(-1), *block_ids])


class NativeCompactor:
    """What both devices share: the operator's fixed arguments.

    Args:
        kv_caches, layout, layers, first_kv_head, manager_block_size: As for `make_compactor`.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        layers: Sequence[int],
        first_kv_head: int,
        manager_block_size: int,
    ) -> None:
        device = kv_caches[0].device
        load(device.type)
        self._kv_caches = list(kv_caches)
        self._layers = torch.tensor(layers, dtype=torch.int32, device=device)
        self._layout = layout_numbers(layout)
        self._first_kv_head = first_kv_head
        self._manager_block_size = manager_block_size
        # csrc/round.h: evicted pairs, copied pairs, block ids that the cache does not have
        self._counters = torch.zeros(3, dtype=torch.int64, device=device)

    def _launch(self, packed: torch.Tensor, num_rounds: int) -> None:
        """Run the operator on what `pack_rounds` made, on the caches' device."""
        split = num_rounds * ROUND_FIELDS
        torch.ops.randkv.compact(
            self._kv_caches,
            packed[:split].view(num_rounds, ROUND_FIELDS),
            packed[split:],
            self._layers,
            self._layout,
            self._first_kv_head,
            self._manager_block_size,
            self._counters,
        )


class CPUCompactor(NativeCompactor):
    """Runs in the calling thread and torch's own; a bad block id is a RuntimeError."""

    def compact(self, rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> None:
        self._launch(torch.from_numpy(pack_rounds(rounds)), len(rounds))

    def take_progress(self) -> Progress:
        evicted, copied, _ = self._counters.tolist()
        self._counters.zero_()
        return Progress(PairCounts(evicted, copied))
