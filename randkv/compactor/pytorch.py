# SPDX-License-Identifier: Apache-2.0
"""Compactor in PyTorch: selection in numpy, moves as one gather and one scatter per layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from randkv.compactor.base import PairCounts, Progress
from randkv.kv_layout import KVLayout
from randkv.planner import RoundPlan, plan_moves

MAX_ELEMENTS = 2**20
"""Elements moved at once: bounds the memory for indices, 8 bytes each for sources and holes."""


class PyTorchCompactor:
    """Works on any `KVLayout` and device; selection and moves are vectorised over all requests.

    Args:
        kv_caches: One tensor per layer, all of one dtype, device and layout.
        layout: Of every tensor.
        layers: Global index of each tensor's layer.
        first_kv_head: Global index of this rank's first KV head.
        manager_block_size: Slots of one block id; a multiple of the layout's block size.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        layers: Sequence[int],
        first_kv_head: int,
        manager_block_size: int,
    ) -> None:
        assert len(kv_caches) == len(layers), f"{len(kv_caches)} caches, {len(layers)} layers"
        assert manager_block_size % layout.block_size == 0, (
            f"manager block size {manager_block_size}, kernel block size {layout.block_size}"
        )
        self._flat = [_flat_view(kv_cache) for kv_cache in kv_caches]
        self._device = kv_caches[0].device
        self._layout = layout
        self._layers = np.asarray(layers)
        self._kv_heads = np.arange(first_kv_head, first_kv_head + layout.num_kv_heads)
        self._manager_block_size = manager_block_size
        # [1, 2, head_size]: added to a slot's offsets of key and value.
        self._dims = torch.from_numpy(
            np.stack([layout.key_dim_offsets, layout.value_dim_offsets])[None]
        ).to(self._device)
        self._evicted = self._copied = 0
        self._max_moves = max(MAX_ELEMENTS // (2 * layout.head_size), 1)

    def compact(self, rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> None:
        layers: list[NDArray[np.intp]] = []
        sources: list[NDArray[np.int64]] = []
        holes: list[NDArray[np.int64]] = []
        num_evicted = 0
        for plan, block_ids in rounds:
            evicted = plan.evicted_slots(self._layers, self._kv_heads)
            num_evicted += evicted.size
            moves = plan_moves(evicted, plan.old_len, plan.new_len)
            blocks = np.asarray(block_ids, np.int64)
            layers.append(moves.layer)
            sources.append(self._slot_offsets(blocks, moves.kv_head, moves.source))
            holes.append(self._slot_offsets(blocks, moves.kv_head, moves.hole))
        layer = np.concatenate(layers)
        # Both are ordered by layer within a round; a stable sort joins the rounds per layer.
        order = np.argsort(layer, kind="stable") if len(rounds) > 1 else slice(None)
        bounds = np.searchsorted(layer[order], np.arange(len(self._flat) + 1))
        source = self._to_device(np.concatenate(sources)[order])
        hole = self._to_device(np.concatenate(holes)[order])
        for flat, first, stop in zip(self._flat, bounds[:-1], bounds[1:], strict=True):
            for start in range(int(first), int(stop), self._max_moves):
                part = slice(start, min(start + self._max_moves, int(stop)))
                kept = flat.index_select(0, self._elements(source[part]))
                flat.index_copy_(0, self._elements(hole[part]), kept)
        self._evicted += num_evicted
        self._copied += len(layer)

    def take_progress(self) -> Progress:
        progress = Progress(PairCounts(self._evicted, self._copied))
        self._evicted = self._copied = 0
        return progress

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _slot_offsets(
        self, block_ids: NDArray[np.int64], kv_head: NDArray[np.intp], slot: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """``[moves, 2]``: where the key and the value of each slot start, in elements."""
        layout = self._layout
        index, offset = np.divmod(slot, self._manager_block_size)
        part, offset = np.divmod(offset, layout.block_size)
        block = block_ids[index] * (self._manager_block_size // layout.block_size) + part
        base = block * layout.block_stride + kv_head * layout.head_stride
        return np.stack(
            [base + layout.key_slot_offsets[offset], base + layout.value_slot_offsets[offset]],
            axis=1,
        )

    def _elements(self, slot_offsets: torch.Tensor) -> torch.Tensor:
        """``[moves * 2 * head_size]``: every element of each slot's key and value."""
        return (slot_offsets.unsqueeze(2) + self._dims).view(-1)


def _flat_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """One-dimensional view of everything the tensor spans, whatever its strides."""
    if kv_cache.element_size() == 1:
        kv_cache = kv_cache.view(torch.uint8)  # fp8: moved as bytes
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(kv_cache.shape, kv_cache.stride(), strict=True)
    )
    return kv_cache.as_strided((span,), (1,))
