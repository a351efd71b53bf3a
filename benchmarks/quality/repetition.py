# SPDX-License-Identifier: Apache-2.0
"""How much of a generation repeats itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """Share of the n-grams of `tokens` that already occurred earlier in them; 0 to 1.

    Raises:
        ValueError: Fewer than `n` tokens, which hold no n-gram.
    """
    if len(tokens) < n:
        raise ValueError(f"{len(tokens)} tokens hold no {n}-gram")
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams)
