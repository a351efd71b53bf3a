# SPDX-License-Identifier: Apache-2.0
"""How much of a generation repeats itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def repeated_share(tokens: Sequence[int], n: int, first: int = 0) -> float:
    """Share of n-grams that already occurred earlier in `tokens`; 0 to 1.

    Counts n-grams whose last token has index `first` or later; the earlier occurrence may be
    anywhere before.

    Raises:
        ValueError: There are none to count.
    """
    seen: set[tuple[int, ...]] = set()
    num_repeated = num_counted = 0
    for last in range(n - 1, len(tokens)):
        gram = tuple(tokens[last - n + 1 : last + 1])
        if last >= first:
            num_counted += 1
            num_repeated += gram in seen
        seen.add(gram)
    if not num_counted:
        raise ValueError(f"{len(tokens)} tokens hold no {n}-gram that ends at {first} or later")
    return num_repeated / num_counted
