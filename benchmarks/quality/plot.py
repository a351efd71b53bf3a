# SPDX-License-Identifier: Apache-2.0
"""The report's tables as one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure as Picture

from benchmarks.quality import comparison
from benchmarks.quality.arm import Arm
from benchmarks.quality.comparison import ScoreRow, TextRow
from benchmarks.quality.record import Record, Settings
from benchmarks.spread import Figure

COLOURS = {"randkv": "#1f77b4", "window": "#d95f02"}
SHIFTS = {"randkv": 1.0, "window": 1.04}
"""Factors on the budget, so that one bar does not hide the other."""

Row = TypeVar("Row", TextRow, ScoreRow)


def draw(settings: Settings, records: Sequence[Record], path: Path) -> None:
    """Write `picture` as PNG."""
    picture(settings, records).savefig(path, dpi=110, metadata={"Software": None})


def picture(settings: Settings, records: Sequence[Record]) -> Picture:
    """Four panels: NLL, agreement, facts, repetition; without what is next to dense."""
    drawn = Picture(figsize=(11, 8), layout="constrained")
    nll, agreement, facts, repetition = drawn.subplots(2, 2).flat
    text = _shown(comparison.text_rows(records))
    _panel(nll, "NLL minus dense, nats per token", ((r.arm, r.nll_difference) for r in text))
    _panel(agreement, "same argmax as dense", ((r.arm, r.agreement) for r in text))
    _facts(facts, settings, records)
    _panel(
        repetition,
        f"repeated {comparison.NUM_REPEATED}-grams minus dense",
        ((r.arm, r.difference) for r in _shown(comparison.repetition_rows(records))),
    )
    drawn.suptitle(f"{settings.model}, {settings.engine}; bars: 95 % intervals over items")
    return drawn


def _shown(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not comparison.is_nearly_dense(row)]


def _panel(axes: Any, title: str, values: Iterable[tuple[Arm, Figure]]) -> None:
    """Markers per kind and buffer size over the budgets, each over tokens of its own: no line."""
    points = list(values)
    for kind, buffer_size in sorted({(arm.kind, arm.buffer_size) for arm, _ in points}):
        chosen = [
            (arm.budget * SHIFTS[kind], figure)
            for arm, figure in points
            if (arm.kind, arm.buffer_size) == (kind, buffer_size)
        ]
        _points(axes, chosen, f"{kind} r={buffer_size}", COLOURS[kind], "none")
    axes.set(title=title, xlabel="budget K, tokens", xscale="log")
    budgets = sorted({arm.budget for arm, _ in points})
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    _finish(axes)


def _facts(axes: Any, settings: Settings, records: Sequence[Record]) -> None:
    """Right answers of RandKV over the budget, by where the fact was stated and how long ago."""
    buffer_size = settings.buffers[0]
    rows = {
        task: [
            right
            for right in _shown(right for right, _ in comparison.fact_rows(records, task))
            if (right.arm.kind, right.arm.buffer_size) == ("randkv", buffer_size)
        ]
        for task in ("prompt-fact", "generated-fact")
    }
    series = sorted({(task, row.distance) for task in rows for row in rows[task]}, reverse=True)
    for number, (task, distance) in enumerate(series):
        chosen = [row for row in rows[task] if row.distance == distance]
        points = [(row.arm.budget * 1.02**number, row.value) for row in chosen]
        label = f"{task.partition('-')[0]}, {distance} tokens ago"
        _points(axes, points, label, f"C{number}", "none")
    budgets = sorted({row.arm.budget for task in rows for row in rows[task]})
    axes.set(title="pass key right (RandKV)", xlabel="budget K, tokens", xscale="log")
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set_ylim(-0.05, 1.05)
    _finish(axes)


def _points(
    axes: Any, points: Sequence[tuple[float, Figure]], label: str, colour: str, style: str
) -> None:
    where = [x for x, _ in points]
    values = [figure.value for _, figure in points]
    below = [figure.value - figure.low for _, figure in points]
    above = [figure.high - figure.value for _, figure in points]
    axes.errorbar(
        where, values, [below, above], label=label, color=colour, ls=style, marker="o", capsize=3
    )


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
