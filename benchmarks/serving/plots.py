# SPDX-License-Identifier: Apache-2.0
"""Plots of stored runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import figures
from benchmarks.serving.record import Run

Grouped = Mapping[str, Mapping[str, Sequence[Run]]]

# Okabe and Ito's colours, which survive colour blindness.
_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_WINDOW = 100
"""Tokens whose latencies a point of the long decode is the median of."""


def draw(grouped: Grouped, directory: Path) -> list[Path]:
    """Write every plot that these runs allow; the files written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    arms = sorted({arm for by_arm in grouped.values() for arm in by_arm}, key=figures.rank)
    colours = {arm: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(arms)}
    written = []
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, plot in (("ratios", _ratios), ("memory", _memory), ("latency", _latency)):
            figure = plot(pyplot, grouped, colours)
            if figure is not None:
                path = directory / f"{name}.png"
                figure.savefig(path, dpi=150)
                pyplot.close(figure)
                written.append(path)
    return written


def _ratios(pyplot: Any, grouped: Grouped, colours: Mapping[str, str]) -> Any:
    """Output tokens/s over dense: a point per arm and workload, every pair behind it."""
    shown = {
        workload: [row for row in figures.rows(by_arm) if row.ratio is not None]
        for workload, by_arm in grouped.items()
    }
    shown = {workload: rows for workload, rows in shown.items() if rows}
    if not shown:
        return None
    count = sum(map(len, shown.values()))
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.3 * count), layout="constrained")
    labels, y = [], 0
    for workload, rows in shown.items():
        for row in rows:
            ratio = row.ratio
            assert ratio is not None
            axes.plot([ratio.low, ratio.high], [y, y], color=colours[row.arm], linewidth=3)
            axes.plot(ratio.value, y, "o", color=colours[row.arm], markersize=7)
            axes.annotate(
                f"{ratio.value:.2f}", (ratio.high, y), (6, -3), textcoords="offset points"
            )
            labels.append(f"{workload}, {row.arm}")
            y += 1
    axes.axvline(1, color="#888888", linewidth=1, zorder=0)
    axes.set_yticks(range(y), labels)
    axes.set_ylim(y - 0.5, -0.5)
    axes.set_xlabel("output tokens/s, ratio to dense (median of pairs, interval or range)")
    return figure


def _memory(pyplot: Any, grouped: Grouped, colours: Mapping[str, str]) -> Any:
    """KV blocks and running requests over time, of the first pair."""
    shown = {
        workload: by_arm
        for workload, by_arm in grouped.items()
        if any(runs[0].samples for runs in by_arm.values())
    }
    if not shown:
        return None
    figure, grid = pyplot.subplots(
        len(shown), 2, figsize=(9, 2.3 * len(shown)), layout="constrained", squeeze=False
    )
    for (workload, by_arm), (blocks, running) in zip(shown.items(), grid, strict=True):
        for arm, runs in by_arm.items():
            run = runs[0]
            seconds = [sample.seconds for sample in run.samples]
            total = run.settings.num_kv_blocks
            look = {"color": colours[arm], "label": arm, "linewidth": 1.2}
            blocks.plot(seconds, [sample.kv_usage * total for sample in run.samples], **look)
            running.plot(seconds, [sample.num_running for sample in run.samples], **look)
            blocks.axhline(total, color="#bbbbbb", linewidth=0.8, zorder=0)
        blocks.set_ylabel("KV blocks in use")
        running.set_ylabel("running requests")
        for axes in (blocks, running):
            axes.set_title(workload, loc="left", fontsize=9)
            axes.set_xlabel("seconds")
            axes.set_ylim(bottom=0)
        running.legend(frameon=False, fontsize=8)
    return figure


def _latency(pyplot: Any, grouped: Grouped, colours: Mapping[str, str]) -> Any:
    """Inter-token latency by position, of workloads of one long request."""
    shown = {
        workload: by_arm
        for workload, by_arm in grouped.items()
        if any(figures.growth_of_itl(runs) is not None for runs in by_arm.values())
    }
    if not shown:
        return None
    figure, grid = pyplot.subplots(
        len(shown), 1, figsize=(7, 3.2 * len(shown)), layout="constrained", squeeze=False
    )
    for (workload, by_arm), (axes,) in zip(shown.items(), grid, strict=True):
        for arm, runs in by_arm.items():
            length = min(len(run.requests[0].itls) for run in runs) // _WINDOW * _WINDOW
            itls = np.array([run.requests[0].itls[:length] for run in runs])
            points = np.median(itls.reshape(len(runs), -1, _WINDOW), axis=2) * 1000
            at = np.arange(points.shape[1]) * _WINDOW + _WINDOW / 2
            for each in points:
                axes.plot(at, each, color=colours[arm], alpha=0.25, linewidth=0.8)
            axes.plot(at, np.median(points, axis=0), color=colours[arm], label=arm, linewidth=1.8)
        axes.set_title(f"{workload}: every run, and their median", loc="left", fontsize=9)
        axes.set_xlabel(f"output tokens (medians over {_WINDOW})")
        axes.set_ylabel("inter-token latency, ms")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    return figure
