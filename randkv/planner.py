# SPDX-License-Identifier: Apache-2.0
"""When a round is due, what it moves, and the logical positions that remain. Pure numpy.

slots   0 ........ P | P ............... L-r | L-r ..... L        N = K + r
        prompt, kept | candidates            | newest r, kept
evicted = selection of L-N candidates
holes   = evicted slots in [P, N)
sources = kept slots in [N, L)          as many as there are holes
moves   = i-th source -> i-th hole, both ascending; then L := N
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from randkv.config import RandKVConfig
from randkv.errors import RandKVConfigError
from randkv.selection import StreamKey, evicted_slots_by_head, stream_key

NO_MOVE = -1
"""Fills rows of a moves array for heads with fewer moves than the array is wide (r = 0 only)."""


def first_due(config: RandKVConfig) -> int:
    """Computed tokens at which the first round is due: the first `L` above ``K + r``."""
    return config.compacted_len + 1


def is_due(config: RandKVConfig, computed_tokens: int, evicted_tokens: int) -> bool:
    """Whether a round is due before the next token is computed."""
    excess = computed_tokens - evicted_tokens - config.compacted_len
    return excess > 0 and (evicted_tokens == 0 or excess >= config.round_interval)


def next_due(config: RandKVConfig, computed_tokens: int) -> int:
    """The smallest count of computed tokens above `computed_tokens` at which a round is due.

    Rounds fall at ``K + r + 1 + i * max(r, 1)`` whatever the chunks, because chunks end there.
    """
    ahead = computed_tokens - first_due(config)
    if ahead < 0:
        return first_due(config)
    return first_due(config) + (ahead // config.round_interval + 1) * config.round_interval


def rounds_run(config: RandKVConfig, computed_tokens: int) -> int:
    """Rounds before `computed_tokens`; one due exactly there has not run yet."""
    after_first = computed_tokens - first_due(config)
    return 0 if after_first <= 0 else 1 + (after_first - 1) // config.round_interval


def physical_len(config: RandKVConfig, computed_tokens: int) -> int:
    """Slots that the request holds with `computed_tokens` computed."""
    rounds = rounds_run(config, computed_tokens)
    return computed_tokens - (1 + (rounds - 1) * config.round_interval if rounds else 0)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy on write: slot block `index` of the request moves from block `source` to `target`."""

    index: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One compaction of one request, as the scheduler tells the worker. No positions travel.

    Attributes:
        request_id: The engine's internal request id.
        round_index: Rounds of this request before this one, replayed ones counted once.
        key: Selection key of the request.
        prompt_len: `P`, tokens.
        old_len: `L`, physical length before, tokens.
        new_len: `N`, physical length after, tokens.
        buffer_size: `r`, tokens.
        num_blocks: Blocks that the request keeps.
        block_copies: Applied before the moves.
    """

    request_id: str
    round_index: int
    key: StreamKey
    prompt_len: int
    old_len: int
    new_len: int
    buffer_size: int
    num_blocks: int
    block_copies: tuple[BlockCopy, ...] = ()

    def evicted_slots(
        self, layers: NDArray[np.integer], kv_heads: NDArray[np.integer]
    ) -> NDArray[np.int32]:
        """Shape ``[layers, kv_heads, L - N]``, ascending; indices are global."""
        return evicted_slots_by_head(
            self.key,
            self.round_index,
            layers,
            kv_heads,
            self.prompt_len,
            self.old_len - self.buffer_size,
            self.old_len - self.new_len,
        )


class MoveList(NamedTuple):
    """The moves of all heads, flat; the four arrays have one entry per move."""

    layer: NDArray[np.intp]
    kv_head: NDArray[np.intp]
    source: NDArray[np.int32]
    hole: NDArray[np.int32]


def plan_moves(evicted: NDArray[np.int32], old_len: int, new_len: int) -> MoveList:
    """Pair the i-th hole with the i-th source of each head.

    Args:
        evicted: Shape ``[layers, heads, n]``, ascending slots below `old_len`.

    Returns:
        `layer` and `kv_head` are indices into the first two axes of `evicted`. Ordered by
        (layer, head, hole).
    """
    is_hole = evicted < new_len
    layer, kv_head, _ = np.nonzero(is_hole)
    hole = evicted[is_hole]
    kept = np.ones((*evicted.shape[:2], old_len - new_len), bool)
    above = np.nonzero(~is_hole)
    kept[above[0], above[1], evicted[~is_hole] - new_len] = False
    source = (np.nonzero(kept)[2] + new_len).astype(np.int32)
    assert len(source) == len(hole), f"{len(source)} sources for {len(hole)} holes"
    return MoveList(layer, kv_head, source, hole)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did to every (layer, KV head), in logical positions.

    Attributes:
        round_index: Counts from 0 per request.
        computed_tokens: `C` at which the round ran; tokens from `C` on do not see the evicted.
        evicted_positions: ``int32 [layers, heads, n]``, ascending logical positions.
        moves: ``int32 [layers, heads, m, 2]``, (source slot, hole); rows of `NO_MOVE` pad heads
            that move less than `m`, which only happens for ``buffer_size == 0``.
        positions: ``int32 [layers, heads, K + r]``, logical position by slot after the round.
        source_offsets: ``int32 [layers, heads, K + r]``, the slot before the round that each
            slot's content came from: itself, or the source of its move.
    """

    round_index: int
    computed_tokens: int
    evicted_positions: NDArray[np.int32]
    moves: NDArray[np.int32]
    positions: NDArray[np.int32]
    source_offsets: NDArray[np.int32]


def _padded(moves: MoveList, shape: tuple[int, int]) -> NDArray[np.int32]:
    counts = np.zeros(shape, np.intp)
    np.add.at(counts, (moves.layer, moves.kv_head), 1)
    padded = np.full((*shape, int(counts.max(initial=0)), 2), NO_MOVE, np.int32)
    starts = np.cumsum(counts.ravel()) - counts.ravel()
    rank = np.arange(len(moves.hole)) - np.repeat(starts, counts.ravel())
    padded[moves.layer, moves.kv_head, rank, 0] = moves.source
    padded[moves.layer, moves.kv_head, rank, 1] = moves.hole
    return padded


def replay(
    config: RandKVConfig,
    *,
    request_key: str,
    prompt_len: int,
    num_tokens: int,
    num_layers: int,
    num_kv_heads: int,
) -> list[Round]:
    """Every round due while a request decodes up to `num_tokens` computed tokens.

    A pure function of its arguments: what the engine did, without asking the engine. Rounds with
    ``C <= num_tokens`` are returned; the one at `C` runs before the token of index `C` is
    computed, so an engine that stops with `num_tokens` computed has not yet run one due there.

    Raises:
        RandKVConfigError: The prompt is longer than the budget.
    """
    if prompt_len > config.budget:
        raise RandKVConfigError("prompt_len", prompt_len, f"at most the budget, {config.budget}")
    key = stream_key(request_key, config.seed)
    layers, kv_heads = np.arange(num_layers), np.arange(num_kv_heads)
    shape = (num_layers, num_kv_heads)
    new_len = config.compacted_len
    rounds: list[Round] = []
    computed, evicted_tokens = first_due(config), 0
    positions = np.empty((*shape, 0), np.int32)
    while computed <= num_tokens:
        old_len = computed - evicted_tokens
        appended = np.arange(computed - (old_len - positions.shape[2]), computed, dtype=np.int32)
        before = np.concatenate(
            [positions, np.broadcast_to(appended, (*shape, len(appended)))], axis=2
        )
        plan = RoundPlan(
            "", len(rounds), key, prompt_len, old_len, new_len, config.buffer_size, num_blocks=0
        )
        evicted = plan.evicted_slots(layers, kv_heads)
        moves = plan_moves(evicted, old_len, new_len)
        source_offsets = np.broadcast_to(np.arange(new_len, dtype=np.int32), (*shape, new_len))
        source_offsets = source_offsets.copy()
        source_offsets[moves.layer, moves.kv_head, moves.hole] = moves.source
        positions = np.take_along_axis(before, source_offsets, axis=2)
        rounds.append(
            Round(
                round_index=len(rounds),
                computed_tokens=computed,
                evicted_positions=np.sort(np.take_along_axis(before, evicted, axis=2), axis=2),
                moves=_padded(moves, shape),
                positions=positions,
                source_offsets=source_offsets,
            )
        )
        evicted_tokens += old_len - new_len
        computed = next_due(config, computed)
    return rounds
