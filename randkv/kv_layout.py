# SPDX-License-Identifier: Apache-2.0
"""What one slot of a KV cache tensor is made of, per attention backend.

Every layout that can be compacted is separable: element `d` of the key in slot `t` of a block,
for one KV head, lies at

    block * block_stride + kv_head * head_stride + key_slot_offsets[t] + key_dim_offsets[d]

and the value likewise. Strided layouts (NHD, HND) are so by construction. The packed layouts of
vLLM's CPU backend are not assumed: they are derived by writing marked tokens through the
engine's own kernel, and refused when they are not separable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from randkv.errors import RandKVLayoutError

WriteTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(keys, values, kv_cache, slot_mapping)``: store tokens the way the engine does.

keys, values: ``[tokens, kv_heads, head_size]``; kv_cache as the engine shapes it;
slot_mapping: int64 ``[tokens]``, ``block * block_size + offset``.
"""


@dataclass(frozen=True)
class KVLayout:
    """Offsets are in elements of the cache's dtype, from the start of the tensor's storage view.

    Attributes:
        block_size: Slots of one block of the tensor (the attention kernel's block size).
        num_kv_heads: KV heads of this rank.
        block_stride, head_stride: Elements from one block, or head, to the next.
        key_slot_offsets, value_slot_offsets: int64 ``[block_size]``.
        key_dim_offsets, value_dim_offsets: int64 ``[head_size]``.
    """

    block_size: int
    num_kv_heads: int
    block_stride: int
    head_stride: int
    key_slot_offsets: NDArray[np.int64]
    value_slot_offsets: NDArray[np.int64]
    key_dim_offsets: NDArray[np.int64]
    value_dim_offsets: NDArray[np.int64]

    @property
    def head_size(self) -> int:
        return len(self.key_dim_offsets)


def _dimensions(kv_cache: torch.Tensor) -> tuple[int, int, int, int]:
    if kv_cache.dim() != 4 or kv_cache.shape[3] % 2:
        raise RandKVLayoutError(
            f"KV cache of shape {tuple(kv_cache.shape)}: expected "
            "[num_blocks, num_kv_heads, block_size, 2 * head_size]. "
            "Choose an attention backend with that layout."
        )
    num_blocks, num_kv_heads, block_size, pair = kv_cache.shape
    return num_blocks, num_kv_heads, block_size, pair // 2


def strided_layout(kv_cache: torch.Tensor) -> KVLayout:
    """Layout of a ``[blocks, kv_heads, block_size, 2 * head_size]`` tensor, K then V in a slot.

    Source: FLASH_ATTN, TRITON_ATTN and FLASHINFER of vLLM 0.28.0; NHD and HND differ in strides.

    Raises:
        RandKVLayoutError: Another shape.
    """
    _, num_kv_heads, block_size, head_size = _dimensions(kv_cache)
    block_stride, head_stride, slot_stride, dim_stride = kv_cache.stride()
    slots = np.arange(block_size, dtype=np.int64) * slot_stride
    dims = np.arange(2 * head_size, dtype=np.int64) * dim_stride
    return KVLayout(
        block_size,
        num_kv_heads,
        block_stride,
        head_stride,
        slots,
        slots,
        dims[:head_size],
        dims[head_size:],
    )


def derived_layout(kv_cache: torch.Tensor, write_tokens: WriteTokens) -> KVLayout:
    """Layout of a packed CPU cache, found by writing marked tokens into a scratch block.

    The mark of (slot, dim) is its number, written one bit at a time as 0 or 1, which every cache
    dtype can hold. `kv_cache` itself is not written; only its shape, strides and dtype are used.

    Raises:
        RandKVLayoutError: A token's elements are not where a separable layout would have them.
    """
    _, num_kv_heads, block_size, head_size = _dimensions(kv_cache)
    if not kv_cache.is_contiguous():
        raise RandKVLayoutError(f"CPU KV cache with strides {kv_cache.stride()}: not contiguous")
    num_elements = block_size * head_size
    head_stride = 2 * num_elements
    scratch = torch.zeros((2, *kv_cache.shape[1:]), dtype=kv_cache.dtype)
    slot_mapping = torch.arange(block_size, 2 * block_size)  # block 1: block 0 is vLLM's null block
    dtype = kv_cache.dtype if kv_cache.element_size() > 1 else torch.bfloat16
    numbers = torch.arange(num_elements).view(block_size, 1, head_size)
    numbers = numbers.expand(block_size, num_kv_heads, head_size)
    zeros = torch.zeros_like(numbers).to(dtype)
    # The last bit marks every element, and so tells element 0 from an untouched one.
    bits = [((numbers >> bit) & 1).to(dtype) for bit in range(num_elements.bit_length())]
    bits.append(torch.ones_like(zeros))

    def offsets(as_key: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = torch.zeros(num_kv_heads * head_stride, dtype=torch.int64)
        for bit, mark in enumerate(bits):
            scratch.zero_()
            key, value = (mark, zeros) if as_key else (zeros, mark)
            write_tokens(key, value, scratch, slot_mapping)
            is_set = scratch[1].reshape(-1).view(_bits_dtype(scratch)) != 0
            found |= is_set.to(torch.int64) << bit
            if bool((scratch[0] != 0).any()):
                raise RandKVLayoutError("writing one block changed another")
        marked = np.flatnonzero(found.numpy() >> (len(bits) - 1))
        head, offset = np.divmod(marked, head_stride)
        number = found.numpy()[marked] - (1 << (len(bits) - 1))
        if len(marked) != num_kv_heads * num_elements or not np.array_equal(
            np.bincount(head, minlength=num_kv_heads), np.full(num_kv_heads, num_elements)
        ):
            raise RandKVLayoutError("a head's elements are not in the head's part of the block")
        table = np.full((num_kv_heads, num_elements), -1)
        table[head, number] = offset
        if (table < 0).any():
            raise RandKVLayoutError("two elements of a block were stored as one")
        grid = table[0].reshape(block_size, head_size)
        slots = grid[:, 0].copy()
        dims = grid[0] - grid[0, 0]
        if (table != table[0]).any() or (grid != slots[:, None] + dims).any():
            raise RandKVLayoutError(
                "the elements of a slot are not at (offset of the slot) + (offset of the element)"
            )
        return slots, dims

    key_slots, key_dims = offsets(as_key=True)
    value_slots, value_dims = offsets(as_key=False)
    return KVLayout(
        block_size,
        num_kv_heads,
        num_kv_heads * head_stride,
        head_stride,
        key_slots,
        value_slots,
        key_dims,
        value_dims,
    )


def _bits_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The integer dtype of the same width, to compare stored bits without interpreting them."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
