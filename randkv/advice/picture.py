# SPDX-License-Identifier: Apache-2.0
"""The trade-off as a picture: requests, modelled speed-up where there is one, and share kept."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from randkv.advice.advisor import ages
from randkv.advice.report import Advice
from randkv.errors import RandKVError

_INK = "#222222"
_REQUESTS = "#0072B2"
_LIGHT = "#56B4E9"
_SPEED = "#CC79A7"
_KEPT = ("#E69F00", "#009E73", "#56B4E9", "#D55E00")
"""Colours of Okabe and Ito; markers and dashes tell the lines apart without them."""
_MARKERS = ("o", "s", "^", "D")
_DASHES = ("-", "--", "-.", ":")
_MARK = "#FFF2CC"


def _label(axes: Any, text: str, x: float, y: float, offset: int) -> None:
    axes.annotate(
        text,
        (x, y),
        (0, offset),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=_INK,
        bbox={"boxstyle": "round,pad=0.1", "color": "white", "alpha": 0.85},
    )


def _requests(axes: Any, of: Advice, budgets: list[int]) -> None:
    longest = [o.held.requests for o in of.options]
    mean = [o.held.requests_half_grown for o in of.options]
    d = of.dense
    axes.plot(budgets, mean, "^:", color=_LIGHT, label="randkv, at mean length")
    axes.plot(budgets, longest, "o-", color=_REQUESTS, label="randkv, each at its longest")
    for x, y in zip(budgets, longest, strict=True):
        _label(axes, f"{y:,}", x, y, -16)
    for count, dash, name in (
        (d.requests_half_grown, ":", "at mean"),
        (d.requests, "--", "at full"),
    ):
        axes.axhline(count, color=_INK, linestyle=dash, label=f"dense, {name} length: {count:,}")
    wanted = of.plan.concurrency
    if wanted is not None:
        axes.axhline(wanted, color="#D55E00", linestyle="-.", label=f"wanted: {wanted:,}")
    axes.set_ylabel("requests at once")
    shown = [*longest, *mean, d.requests, d.requests_half_grown, wanted or d.requests]
    if min(shown):
        axes.set_yscale("log", subs=())
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    else:
        axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(min(shown) / 3, 2 * max(shown))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _speed(axes: Any, of: Advice, budgets: list[int]) -> None:
    speedups = [o.modelled_speedup for o in of.options]
    shown = [(b, s) for b, s in zip(budgets, speedups, strict=True) if s is not None]
    axes.plot(*zip(*shown, strict=True), "s-", color=_SPEED, label="modelled, not measured")
    for x, y in shown:
        _label(axes, f"{y:.1f}x", x, y, 7)
    axes.axhline(1, color=_INK, linestyle=":", label="dense")
    axes.set_ylabel("modelled output tokens/s\nover dense (ratio)")
    axes.set_ylim(0, 1.25 * max(1, *(s for _, s in shown)))


def _kept(axes: Any, of: Advice, budgets: list[int]) -> None:
    lines = [("all generated tokens", [o.share_of_output_kept for o in of.options])]
    lines += [
        (f"{age:,} tokens old", [o.share_kept[age] for o in of.options])
        for age in ages(of.plan.workload.output_tokens)
    ]
    for (label, shares), colour, marker, dash in zip(lines, _KEPT, _MARKERS, _DASHES, strict=False):
        axes.plot(
            budgets,
            [100 * share for share in shares],
            marker=marker,
            linestyle=dash,
            color=colour,
            label=label,
        )
    axes.axhline(100, color=_INK, linestyle=":", label="dense")
    axes.set_ylabel("held by a KV head\nat the end (%)")
    axes.set_ylim(-3, 108)
    axes.set_xlabel("budget (tokens per KV head, prompt included)")


def to_png(of: Advice) -> bytes:
    """Panels over one axis of budgets; a band marks the recommended one.

    Raises:
        RandKVError: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise RandKVError(
            "A picture of the advice needs Matplotlib, which is not installed. "
            "pip install matplotlib, or leave --output out."
        ) from None
    panels = [_requests, _kept]
    if any(o.modelled_speedup for o in of.options):
        panels.insert(1, _speed)
    figure = Figure(figsize=(8.5, 1.2 + 2.7 * len(panels)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    budgets = [o.budget for o in of.options]
    chosen = of.recommendation.budget
    all_axes = figure.subplots(len(panels), 1, sharex=True)
    for draw, axes in zip(panels, all_axes, strict=True):
        if chosen is not None:
            axes.axvspan(chosen / 1.15, chosen * 1.15, color=_MARK, zorder=0)
        draw(axes, of, budgets)
        axes.grid(axis="y", color="#DDDDDD")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    all_axes[-1].set_xscale("log", base=2)
    all_axes[-1].set_xlim(budgets[0] / 1.4, budgets[-1] * 1.4)
    all_axes[-1].set_xticks(budgets, [f"{b:,}" for b in budgets])
    all_axes[-1].minorticks_off()
    work, model = of.plan.workload, Path(of.shape.name).name[-48:]
    shaded = "" if chosen is None else " (shaded)"
    figure.suptitle(
        f"{model}: prompt {work.prompt_tokens:,}, output {work.output_tokens:,} "
        f"tokens, {of.plan.memory.num_bytes / 2**30:,.1f} GiB of KV memory per GPU\n"
        f"recommended: {of.recommendation.name}{shaded}",
        fontsize=11,
    )
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
