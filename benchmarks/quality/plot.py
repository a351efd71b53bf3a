# SPDX-License-Identifier: Apache-2.0
"""The report's tables as one picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture

from benchmarks.quality import comparison
from benchmarks.quality.arm import Arm
from benchmarks.quality.record import Record, Settings
from benchmarks.spread import Figure

COLOURS = {"randkv": "#1f77b4", "window": "#d95f02"}
SHIFTS = {"randkv": 1.0, "window": 1.04}
"""Factors on the budget, so that one bar does not hide the other."""


def draw(settings: Settings, records: Sequence[Record], path: Path) -> None:
    """Write a PNG of four panels: NLL, agreement, facts, repetition."""
    picture = Picture(figsize=(11, 8), layout="constrained")
    nll, agreement, facts, repetition = picture.subplots(2, 2).flat
    text = comparison.text_rows(records)
    _panel(nll, "NLL minus dense, nats per token", ((r.arm, r.nll_difference) for r in text))
    _panel(agreement, "same argmax as dense", ((r.arm, r.agreement) for r in text))
    _facts(facts, settings, records)
    _panel(
        repetition,
        f"repeated {comparison.NUM_REPEATED}-grams minus dense",
        ((r.arm, r.difference) for r in comparison.repetition_rows(records)),
    )
    picture.suptitle(f"{settings.model}, {settings.engine}; bars: 95 % intervals over items")
    picture.savefig(path, dpi=110, metadata={"Software": None})


def _panel(axes: Any, title: str, values: Iterable[tuple[Arm, Figure]]) -> None:
    """One line per kind and buffer size over the budgets."""
    points = list(values)
    for kind, buffer_size in sorted({(arm.kind, arm.buffer_size) for arm, _ in points}):
        line = [
            (arm.budget * SHIFTS[kind], figure)
            for arm, figure in points
            if (arm.kind, arm.buffer_size) == (kind, buffer_size)
        ]
        _line(axes, line, f"{kind} r={buffer_size}", COLOURS[kind])
    axes.set(title=title, xlabel="budget K, tokens", xscale="log")
    budgets = sorted({arm.budget for arm, _ in points})
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    _finish(axes)


def _facts(axes: Any, settings: Settings, records: Sequence[Record]) -> None:
    """Right answers over the distance; solid: stated in the prompt, dashed: in generated text."""
    buffer_size = settings.buffers[0]
    budgets = list(settings.budgets)
    for task, style in (("prompt-fact", "-"), ("generated-fact", "--")):
        rows = [right for right, _ in comparison.fact_rows(records, task)]
        shown = [r for r in rows if (r.arm.kind, r.arm.buffer_size) == ("randkv", buffer_size)]
        for budget in sorted({row.arm.budget for row in shown}):
            line = [(row.distance, row.value) for row in shown if row.arm.budget == budget]
            where = task.partition("-")[0]
            _line(axes, line, f"{where} K={budget}", f"C{budgets.index(budget)}", style)
    axes.set(title="pass key right (RandKV)", xlabel="tokens between fact and question")
    axes.set_ylim(-0.05, 1.05)
    _finish(axes)


def _line(
    axes: Any, points: Sequence[tuple[float, Figure]], label: str, colour: str, style: str = "-"
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
