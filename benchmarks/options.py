# SPDX-License-Identifier: Apache-2.0
"""Types of command line options that several benchmarks have."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def whole_number(low: int) -> Callable[[str], int]:
    """A type of integers from `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise ArgumentTypeError(f"{text!r}: expected a whole number from {low}")
        return value

    return parse
