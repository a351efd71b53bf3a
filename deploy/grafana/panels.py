# SPDX-License-Identifier: Apache-2.0
"""Panels as these dashboards use them: a big number, a graph, a name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    DataSourceRef,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    LineInterpolation,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    FieldColorModeId,
    FieldColorSeriesByMode,
    Threshold,
    ThresholdsMode,
)
from promql import quantile

DATA_SOURCE = DataSourceRef(type_val="prometheus", uid="randkv-prometheus")
STAT_HEIGHT = 4
GRAPH_HEIGHT = 7
MAX_JOINED_GAP_MS = 120_000
"""In graphs of what is missing while nothing happens; longer gaps stay open."""

Panel = stat.Panel | timeseries.Panel


class Query(NamedTuple):
    """One target. `legend` may name labels in ``{{}}``."""

    legend: str
    expr: str


class Step(NamedTuple):
    """`colour` from `value` up to the next step; the first step has no value."""

    colour: str
    value: float | None = None


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    decimals: int | None = None,
    steps: Sequence[Step] = (Step("blue"),),
    no_value: str = "idle",
    maximum: float | None = None,
) -> Panel:
    """The value now, in the colour of the step that it has reached; `no_value` if there is none."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .min(0)
        .no_value(no_value)
        .thresholds(_thresholds(steps))
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .text_mode(BigValueTextMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .targets(_targets([query], is_instant=True))
        .height(STAT_HEIGHT)
        .span(4)
    )
    if decimals is not None:
        panel.decimals(decimals)
    if maximum is not None:
        panel.max(maximum)
    return panel


def names(title: str, description: str, query: Query) -> Panel:
    """What the series of a query are called, one beside the other."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATA_SOURCE)
        .unit("none")
        .no_value("no server")
        .thresholds(_thresholds([Step("text")]))
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .text_mode(BigValueTextMode.NAME)
        .text(common.VizTextDisplayOptions().value_size(18))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .targets(_targets([query], is_instant=True))
        .height(3)
        .span(24)
    )


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    steps: Sequence[Step] = (),
    stacked: bool = False,
    stepped: bool = False,
    joined: bool = False,
    decimals: int | None = None,
    maximum: float | None = None,
    soft_maximum: float | None = None,
    span: int = 8,
) -> Panel:
    """Lines over time.

    Args:
        steps: Drawn as dashed lines.
        joined: For ratios and quantiles: short gaps, in which nothing happened, are bridged. In any
            other graph a gap says that a server was not there.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATA_SOURCE)
        .unit(unit)
        .min(0)
        .no_value("nothing yet")
        .color_scheme(
            dashboard.FieldColor()
            .mode(FieldColorModeId.PALETTE_CLASSIC)
            .series_by(FieldColorSeriesByMode.LAST)
        )
        .line_width(2)
        .fill_opacity(25 if stacked else 0 if stepped else 8)
        .show_points(VisibilityMode.AUTO)
        .point_size(5)
        .span_nulls(MAX_JOINED_GAP_MS if joined else False)
        .line_interpolation(LineInterpolation.STEP_AFTER if stepped else LineInterpolation.LINEAR)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs([])
        )
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
        .targets(_targets(queries, is_instant=False))
        .height(GRAPH_HEIGHT)
        .span(span)
    )
    if steps:
        panel.thresholds(_thresholds(steps)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("all"))
    if decimals is not None:
        panel.decimals(decimals)
    if maximum is not None:
        panel.max(maximum)
    if soft_maximum is not None:
        panel.axis_soft_max(soft_maximum)
    return panel


def quantiles(title: str, description: str, histogram: str, span: int = 8) -> Panel:
    """Graph of a time's median, 95th and 99th percentile."""
    queries = (
        Query(f"p{share * 100:g}", quantile(share, histogram)) for share in (0.5, 0.95, 0.99)
    )
    return graph(title, description, *queries, unit="s", joined=True, span=span)


def _targets(queries: Sequence[Query], *, is_instant: bool) -> list[Builder[Dataquery]]:
    targets: list[Builder[Dataquery]] = []
    for index, query in enumerate(queries):
        target = prometheus.Dataquery().datasource(DATA_SOURCE).ref_id(chr(ord("A") + index))
        target.expr(query.expr).legend_format(query.legend)
        targets.append(target.instant() if is_instant else target.range())
    return targets


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    values = [step.value for step in steps[1:]]
    assert steps[0].value is None, steps
    assert all(a is not None and b is not None and a < b for a, b in pairwise(values)), steps
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=step.value, color=step.colour) for step in steps])
    )
