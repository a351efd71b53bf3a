# SPDX-License-Identifier: Apache-2.0
"""A figure with its spread: every figure of a benchmark is one of these. Pure numpy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

NUM_RESAMPLES = 10_000
MIN_VALUES = 6
"""From here on the extremes enclose the median in more than 95 % of all samples."""


class Figure(NamedTuple):
    """One value per pair or prompt, summed up.

    Attributes:
        value: Median, mean or share of the values.
        low: Lower end of its 95 % interval: bootstrap (percentiles), of a share Wilson's; or the
            lowest value.
        high: Upper end, or the highest value.
        num_values: How many values there were.
        is_range: `low` and `high` are the extremes: too few values for an interval.
    """

    value: float
    low: float
    high: float
    num_values: int
    is_range: bool = False

    def text(self, digits: int = 3) -> str:
        """``1.234 (1.200 to 1.300)``; ``1.234 (1.200 to 1.300, all 5)`` for a range."""
        every = f", all {self.num_values}" if self.is_range else ""
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f}{every})"


def _figure(values: Sequence[float], statistic: Callable[..., Any]) -> Figure:
    if not values:
        raise ValueError("a figure needs at least one value")
    array = np.asarray(values, np.float64)
    dice = np.random.default_rng(0)
    drawn = array[dice.integers(len(array), size=(NUM_RESAMPLES, len(array)))]
    low, high = np.percentile(statistic(drawn, axis=1), [2.5, 97.5])
    return Figure(float(statistic(array)), float(low), float(high), len(array))


def median(values: Sequence[float]) -> Figure:
    """The median with its interval; resampling is seeded, so the answer is always the same.

    Of fewer than six values no interval of the median holds 95 %: then it is their range.
    """
    figure = _figure(values, np.median)
    if len(values) >= MIN_VALUES:
        return figure
    return Figure(figure.value, min(values), max(values), len(values), is_range=True)


def median_and_quartiles(values: Sequence[float], digits: int = 3) -> str:
    """``1.234 (1.200 to 1.300), quartiles 1.100 to 1.400``."""
    text = median(values).text(digits)
    if len(values) < 2:
        return text
    low, _, high = statistics.quantiles(values, n=4)
    return f"{text}, quartiles {low:.{digits}f} to {high:.{digits}f}"


def mean(values: Sequence[float]) -> Figure:
    """The mean with its interval; resampling is seeded, so the answer is always the same."""
    return _figure(values, np.mean)


def share(values: Sequence[float]) -> Figure:
    """The share of ones among zeros and ones, with Wilson's interval: it has a width at 0, too."""
    if not values:
        raise ValueError("a figure needs at least one value")
    number, value = len(values), sum(values) / len(values)
    z = NormalDist().inv_cdf(0.975)
    centre = value + z**2 / (2 * number)
    half = z * (value * (1 - value) / number + z**2 / (4 * number**2)) ** 0.5
    low, high = ((centre + side) / (1 + z**2 / number) for side in (-half, half))
    # Rounding must not put the share outside.
    return Figure(value, max(0.0, min(low, value)), min(1.0, max(high, value)), number)
