# SPDX-License-Identifier: Apache-2.0
"""Selection contract v1: which candidate slots a KV head evicts. Pure numpy.

A function of (key, round, layer, KV head, slot) alone: no generator state, so batch order,
ranks and history cannot change it. Every back end must give the same answer bit for bit.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011),
Philox4x32-10.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONTRACT = b"randkv/1\0"
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10


class StreamKey(NamedTuple):
    """Philox key of one request; two words of 32 bits."""

    k0: int
    k1: int


def stream_key(request_key: str, seed: int) -> StreamKey:
    """Key of the request named `request_key` under policy seed `seed` (0 <= seed < 2**64)."""
    message = CONTRACT + seed.to_bytes(8, "little") + request_key.encode()
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return StreamKey(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))


def _philox(
    key: tuple[int, int],
    c0: NDArray[np.uint64],
    c1: NDArray[np.uint64],
    c2: NDArray[np.uint64],
    c3: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Philox4x32-10 of counters that broadcast; the four words are the last axis."""
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> _32) ^ c1 ^ np.uint64(k0)
        c1 = product_1 & _LOW_32
        c2 = (product_0 >> _32) ^ c3 ^ np.uint64(k1)
        c3 = product_0 & _LOW_32
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def priorities(
    key: tuple[int, int],
    round_index: int,
    layers: NDArray[np.integer],
    kv_heads: NDArray[np.integer],
    first_slot: int,
    stop_slot: int,
) -> NDArray[np.uint64]:
    """Priorities of slots ``[first_slot, stop_slot)``, each below 2**32.

    Args:
        layers: Global layer indices, shape ``[A]``.
        kv_heads: Global KV head indices, shape ``[H]``.

    Returns:
        Shape ``[A, H, stop_slot - first_slot]``.
    """
    first_group = first_slot // 4
    groups = np.arange(first_group, max(first_group, -(-stop_slot // 4)), dtype=np.uint64)
    words = _philox(
        key,
        groups[None, None, :],
        np.full((1, 1, 1), round_index, np.uint64),
        layers.astype(np.uint64)[:, None, None],
        kv_heads.astype(np.uint64)[None, :, None],
    )
    flat = words.reshape(len(layers), len(kv_heads), 4 * len(groups))
    return flat[..., first_slot - 4 * first_group : stop_slot - 4 * first_group]


def evicted_slots_by_head(
    key: tuple[int, int],
    round_index: int,
    layers: NDArray[np.integer],
    kv_heads: NDArray[np.integer],
    first_slot: int,
    stop_slot: int,
    num_evict: int,
) -> NDArray[np.int32]:
    """`evicted_slots` of every (layer, KV head); shape ``[A, H, num_evict]``, ascending."""
    num_candidates = stop_slot - first_slot
    if not 0 <= num_evict <= num_candidates:
        raise ValueError(
            f"num_evict is {num_evict}, but slots [{first_slot}, {stop_slot}) hold "
            f"{max(num_candidates, 0)} candidates"
        )
    if num_evict == 0:
        return np.empty((len(layers), len(kv_heads), 0), np.int32)
    order = priorities(key, round_index, layers, kv_heads, first_slot, stop_slot) << _32
    order |= np.arange(first_slot, stop_slot, dtype=np.uint64)
    if num_evict < num_candidates:
        order = np.partition(order, num_evict - 1, axis=-1)[..., :num_evict]
    slots = (order & _LOW_32).astype(np.int32)
    slots.sort(axis=-1)
    return slots


def evicted_slots(
    key: tuple[int, int],
    round_index: int,
    layer: int,
    kv_head: int,
    first_slot: int,
    stop_slot: int,
    num_evict: int,
) -> NDArray[np.int32]:
    """The `num_evict` slots of ``[first_slot, stop_slot)`` with the smallest (priority, slot).

    Args:
        key: From `stream_key`.
        round_index: Rounds of this request before this one.
        layer: Global layer index.
        kv_head: Global KV head index.

    Returns:
        Shape ``[num_evict]``, ascending.

    Raises:
        ValueError: `num_evict` is negative or more than the candidates.
    """
    one = np.array([layer]), np.array([kv_head])
    slots = evicted_slots_by_head(key, round_index, *one, first_slot, stop_slot, num_evict)
    return slots.reshape(num_evict)
