# SPDX-License-Identifier: Apache-2.0
"""Figures and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks import spread


def test_interval_is_that_of_scipys_bootstrap() -> None:
    values = np.random.default_rng(1).normal(10, 2, 40)
    figure = spread.mean(values.tolist())
    expected = stats.bootstrap((values,), np.mean, method="percentile", rng=2).confidence_interval
    assert figure.value == pytest.approx(values.mean())
    assert (figure.low, figure.high) == pytest.approx((expected.low, expected.high), abs=0.05)
    assert figure.num_values == 40


def test_same_values_give_the_same_figure() -> None:
    values = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert spread.mean(values) == spread.mean(values)
    assert spread.median([*values, 1.3]) == spread.median([*values, 1.3])


def test_few_values_have_a_range_and_say_so() -> None:
    values = [1.0, 1.2, 0.9, 1.1, 1.05]
    assert spread.median(values).text(2) == "1.05 (0.90 to 1.20, all 5)"
    assert spread.median([*values, 1.3]).is_range is False
    assert spread.median([1.0]).text(1) == "1.0 (1.0 to 1.0, all 1)"


def test_no_values_make_no_figure() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        spread.median([])
