# SPDX-License-Identifier: Apache-2.0
"""Which positions of a request each KV head still holds, from the request's key alone. Pure numpy.

The same rounds as `planner.replay`, for one layer and without the history that replay keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from randkv.config import RandKVConfig, check_integer, check_request_key
from randkv.errors import RandKVConfigError
from randkv.planner import RoundPlan, first_due, next_due, plan_moves
from randkv.selection import StreamKey, stream_key

MAX_COMPUTED_TOKENS = 2**20
MAX_LAYERS = 4096
MAX_KV_HEADS = 1024
MAX_WORK = 160_000_000
"""Slots that all rounds of all heads may span: about five seconds on one core."""
_ROUND_COST = 2**13
"""What a round costs before its first slot, in slots."""
_SLOTS_AT_ONCE = 2**16
"""Heads are replayed in groups of about this many slots, so that the work fits the cache."""


@dataclass(frozen=True, slots=True)
class RetentionMap:
    """What one layer holds of a request with `computed_tokens` computed.

    Attributes:
        layer: Global layer index.
        rounds: Rounds that have run.
        kept: ``bool [num_kv_heads, computed_tokens]``, by position.
    """

    config: RandKVConfig
    request_key: str
    prompt_tokens: int
    computed_tokens: int
    layer: int
    num_kv_heads: int
    rounds: int
    kept: NDArray[np.bool_]

    @property
    def physical_tokens(self) -> int:
        """Positions that each KV head holds."""
        return int(np.count_nonzero(self.kept[0]))

    @property
    def evicted_tokens(self) -> int:
        """Positions that each KV head has dropped."""
        return self.computed_tokens - self.physical_tokens

    @property
    def newest_from(self) -> int:
        """First position of the buffer, which ends at `computed_tokens`."""
        return max(self.prompt_tokens, self.computed_tokens - self.config.buffer_size)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `kept` is a list of half-open ``[start, stop]`` ranges per KV head."""
        return {
            "request_key": self.request_key,
            "policy": self.config.to_dict(),
            "layer": self.layer,
            "num_kv_heads": self.num_kv_heads,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "physical_tokens": self.physical_tokens,
            "evicted_tokens": self.evicted_tokens,
            "rounds": self.rounds,
            "newest_from": self.newest_from,
            "kept": [_ranges(row) for row in self.kept],
        }


def _ranges(row: NDArray[np.bool_]) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(row, prepend=False, append=False))
    ranges: list[list[int]] = edges.reshape(-1, 2).tolist()
    return ranges


def _check(
    config: RandKVConfig,
    prompt_tokens: int,
    computed_tokens: int,
    layer: int,
    num_kv_heads: int,
) -> None:
    check_integer(
        "prompt_tokens",
        prompt_tokens,
        1,
        config.budget,
        "The whole prompt is kept: raise the budget or shorten the prompt.",
    )
    check_integer("computed_tokens", computed_tokens, prompt_tokens, MAX_COMPUTED_TOKENS)
    check_integer("layer", layer, 0, MAX_LAYERS - 1)
    check_integer("num_kv_heads", num_kv_heads, 1, MAX_KV_HEADS)
    max_rounds = MAX_WORK // (num_kv_heads * config.max_physical_len + _ROUND_COST)
    limit = min(MAX_WORK // num_kv_heads, first_due(config) + max_rounds * config.round_interval)
    if computed_tokens > limit:
        raise RandKVConfigError(
            "computed_tokens",
            computed_tokens,
            f"at most {limit}, as far as {num_kv_heads} KV heads with budget {config.budget} and "
            f"buffer_size {config.buffer_size} can be replayed in a few seconds",
            "Ask for fewer tokens or KV heads, or use a larger buffer_size.",
        )


def _run_rounds(
    kept: NDArray[np.bool_],
    config: RandKVConfig,
    key: StreamKey,
    prompt_tokens: int,
    layer: int,
    kv_heads: NDArray[np.integer],
) -> int:
    """Clear in `kept` what the rounds before its last column evict; returns their number."""
    computed_tokens = kept.shape[1]
    new_len, layers, rows = config.compacted_len, np.array([layer]), np.arange(len(kept))[:, None]
    rounds, physical, evicted_tokens = 0, 0, 0
    computed = first_due(config)
    slots = min(config.max_physical_len, computed_tokens)
    positions = np.empty((len(kept), slots), np.int32)
    while computed < computed_tokens:
        old_len = computed - evicted_tokens
        positions[:, physical:old_len] = np.arange(physical + evicted_tokens, computed)
        plan = RoundPlan(
            "", rounds, key, prompt_tokens, old_len, new_len, config.buffer_size, num_blocks=0
        )
        evicted = plan.evicted_slots(layers, kv_heads)
        kept[rows, np.take_along_axis(positions, evicted[0], axis=1)] = False
        moves = plan_moves(evicted, old_len, new_len)
        positions[moves.kv_head, moves.hole] = positions[moves.kv_head, moves.source]
        rounds, physical, evicted_tokens = rounds + 1, new_len, computed - new_len
        computed = next_due(config, computed)
    return rounds


def retention_map(
    config: RandKVConfig,
    *,
    request_key: str,
    prompt_tokens: int,
    computed_tokens: int,
    layer: int,
    num_kv_heads: int,
) -> RetentionMap:
    """What the KV heads of one layer hold after `computed_tokens`, prompt included.

    A round due exactly at `computed_tokens` has not run: it runs before the next token.

    Args:
        layer: Global layer index.
        num_kv_heads: KV heads of the whole model, not of one rank.

    Raises:
        RandKVConfigError: An argument is out of range, the prompt is longer than the budget, or
            the rounds are more work than `MAX_WORK`.
    """
    check_request_key("request_key", request_key)
    _check(config, prompt_tokens, computed_tokens, layer, num_kv_heads)
    key = stream_key(request_key, config.seed)
    kept = np.ones((num_kv_heads, computed_tokens), np.bool_)
    step = max(1, _SLOTS_AT_ONCE // config.max_physical_len)
    rounds = 0
    for first in range(0, num_kv_heads, step):
        group = kept[first : first + step]
        kv_heads = np.arange(first, first + len(group))
        rounds = _run_rounds(group, config, key, prompt_tokens, layer, kv_heads)
    return RetentionMap(
        config,
        request_key,
        prompt_tokens,
        computed_tokens,
        layer,
        num_kv_heads,
        rounds,
        kept,
    )
