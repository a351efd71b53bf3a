# SPDX-License-Identifier: Apache-2.0
"""Closed forms of what the planner's rounds do to a request, before anything is drawn.

computed tokens C    1 ..... K+r+1 | K+r+2 ..... K+2r+1 | K+2r+2 .....          m = max(r, 1)
physical length L    C             | K+r+1 ..... K+r+m  | K+r+1 ..... K+r+m | and so on
rounds that ran      0             | 1                  | 2
evicted/candidates                 1/(K+1-P)            m/(K+m-P)           m/(K+m-P)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from randkv.config import RandKVConfig
from randkv.planner import first_due, physical_len, rounds_run

Tokens = NDArray[np.int64]


def share_kept(
    config: RandKVConfig, *, prompt_tokens: int, computed_tokens: int, position: int
) -> float:
    """Probability that a KV head still holds `position` with `computed_tokens` computed.

    A position is a candidate from ``C >= position + r + 1`` on; a round keeps a candidate with
    probability 1 - evicted/candidates, independently of the other rounds. For all but the first
    that is ``(K - P) / (K + r - P)``, as in the paper (arXiv 2609.03430).
    """
    if position < prompt_tokens:
        return 1.0
    room, interval = config.budget - prompt_tokens, config.round_interval
    first_as_candidate = max(0, -(-(position - config.budget) // interval))
    num_rounds = rounds_run(config, computed_tokens) - first_as_candidate
    if num_rounds <= 0:
        return 1.0
    steady = room / (room + interval)
    if first_as_candidate:
        return float(steady**num_rounds)
    return float(room / (room + 1) * steady ** (num_rounds - 1))


def share_of_output_kept(config: RandKVConfig, *, prompt_tokens: int, output_tokens: int) -> float:
    """Mean of `share_kept` over all generated tokens, at the end; the last is never computed."""
    generated = output_tokens - 1
    if generated == 0:
        return 1.0
    held = physical_len(config, prompt_tokens + generated) - prompt_tokens
    return held / generated


def _units_up_to(length: Tokens, unit: int) -> Tokens:
    """Sum of ``ceil(i / unit)`` over ``i`` from 1 to `length`."""
    whole, rest = np.divmod(length, unit)
    total: Tokens = unit * whole * (whole + 1) // 2 + rest * (whole + 1)
    return total


def units_over_life(
    config: RandKVConfig | None, prompts: Tokens, outputs: Tokens, unit: int
) -> Tokens:
    """Sum of ``ceil(L / unit)`` over the steps of each request, of which it has `outputs`.

    Args:
        config: None for dense.
        prompts: Prompt tokens per request, none above the budget.
        outputs: Output tokens per request, at least 1.
        unit: Block size; 1 for tokens.
    """
    last = prompts + outputs - 1
    before = _units_up_to(prompts - 1, unit)
    if config is None:
        dense: Tokens = _units_up_to(last, unit) - before
        return dense
    shortest, interval = config.compacted_len, config.round_interval
    floor = _units_up_to(np.int64(shortest), unit)  # type: ignore[arg-type]
    cycle = _units_up_to(np.int64(shortest + interval), unit) - floor  # type: ignore[arg-type]
    growing = _units_up_to(np.minimum(last, first_due(config)), unit) - before
    cycles, rest = np.divmod(np.maximum(last - first_due(config), 0), interval)
    total: Tokens = growing + cycles * cycle + _units_up_to(shortest + rest, unit) - floor
    return total
