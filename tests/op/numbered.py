# SPDX-License-Identifier: Apache-2.0
"""Caches whose slots hold their own number, so that moves can be read off them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

BLOCK_SIZE = 16


def numbered_cache(num_slots: int, num_kv_heads: int = 1) -> torch.Tensor:
    """float32 cache of head size 1 whose slots hold their own number, in block order."""
    num_blocks = -(-num_slots // BLOCK_SIZE)
    numbers = torch.arange(num_blocks * BLOCK_SIZE, dtype=torch.float32)
    numbers = numbers.view(num_blocks, 1, BLOCK_SIZE, 1)
    return numbers.expand(num_blocks, num_kv_heads, BLOCK_SIZE, 2).clone()


def slots_of(cache: torch.Tensor, kv_head: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What each slot of a cache in block order holds."""
    return cache[:, kv_head, :, 0].reshape(-1).numpy().astype(np.int64)
