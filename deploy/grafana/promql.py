# SPDX-License-Identifier: Apache-2.0
"""PromQL, filtered on the dashboards' variables."""

from __future__ import annotations

SELECTOR = 'model_name=~"$model_name",instance=~"$instance"'
WINDOW = "[$__rate_interval]"


def series(metric: str, *matchers: str) -> str:
    """Selector of a metric that has the label ``model_name``."""
    return f"{metric}{{{','.join((SELECTOR, *matchers))}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """Sum of a counter's increase per second; `by` names labels that stay."""
    kept = f" by ({by})" if by else ""
    return f"sum{kept} (rate({series(metric, *matchers)}{WINDOW}))"


def rate_or_zero(metric: str, *matchers: str) -> str:
    """As `rate`; 0, not nothing, where a server is up and has not counted such an event yet."""
    return f"{rate(metric, *matchers)} or 0 * max({series('randkv_build_info')})"


def rate_of_seen(metric: str, by: str) -> str:
    """As `rate`, without those that were never counted: in a stack their zeros hide others."""
    return f"{rate(metric, by=by)} and sum by ({by}) ({series(metric)}) > 0"


def ratio(numerator: str, denominator: str) -> str:
    """Nothing, rather than NaN or a made-up 0, while the denominator is 0."""
    return f"({numerator}) / (({denominator}) > 0)"


def quantile(share: float, histogram: str, *matchers: str) -> str:
    """Of what was observed in the window; nothing (NaN is not >= 0) where that is nothing."""
    buckets = rate(f"{histogram}_bucket", *matchers, by="le")
    return f"histogram_quantile({share:g}, {buckets}) >= 0"


def average(histogram: str, *matchers: str) -> str:
    return ratio(rate(f"{histogram}_sum", *matchers), rate(f"{histogram}_count", *matchers))


def of_servers(selector: str) -> str:
    """`selector`, whose series have no ``model_name``, where a chosen model was in the last day.

    A server that is down has no ``randkv_build_info`` at the moment, but is to be seen.
    """
    known = f"last_over_time({series('randkv_build_info')}[1d])"
    return f"({selector} and on (job, instance) {known})"
