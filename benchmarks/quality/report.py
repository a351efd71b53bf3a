# SPDX-License-Identifier: Apache-2.0
"""The report of a run as Markdown, from its stored settings and records alone."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.markdown import table
from benchmarks.quality import comparison
from benchmarks.quality.comparison import ScoreRow, TextRow
from benchmarks.quality.record import Record, Settings
from benchmarks.spread import Figure

BANDS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Edges of the position bands; tokens."""
NEARLY_DENSE = "†"
"""Marks rows of `comparison.is_nearly_dense`."""


def signed(figure: Figure, digits: int = 3) -> str:
    """``+0.123 (+0.100 to +0.150)``: a difference."""
    value, low, high = (f"{v:+.{digits}f}" for v in figure[:3])
    return f"{value} ({low} to {high})"


def percent(figure: Figure, is_difference: bool = False) -> str:
    """``83 % (67 to 100)``; of a difference ``-17 (-33 to -8)``, in points."""
    sign, unit = ("+", "") if is_difference else ("", " %")
    value, low, high = (f"{100 * v:{sign}.0f}" for v in figure[:3])
    return f"{value}{unit} ({low} to {high})"


def evicted(row: TextRow | ScoreRow) -> str:
    """``33``, or ``1 †`` where that is too few."""
    mark = f" {NEARLY_DENSE}" if comparison.is_nearly_dense(row) else ""
    return f"{row.evicted:,}{mark}"


def report(settings: Settings, records: Sequence[Record]) -> str:
    """Every table, each with what it is and how many items it is over."""
    return "\n".join(
        [
            "# Quality\n",
            _head(settings, records),
            "## Held-out text, teacher-forced\n",
            _text(records),
            "## By position\n",
            _bands(records),
            "## A fact stated once\n",
            _facts(records),
            "## Repetition in free generation\n",
            _repetition(settings, records),
            "![the same as plots](quality.png)\n",
        ]
    )


def _head(settings: Settings, records: Sequence[Record]) -> str:
    missing = settings.num_records - len(records)
    incomplete = f"**Incomplete: {missing} records are missing; run again to go on.** "
    preemptions = sum(record.preemptions for record in records)
    early = comparison.largest_early_difference(records)
    unaffected = (
        ""
        if early is None
        else " Before an arm's first eviction its log-probabilities differ from dense by at most "
        f"{early:.0e}."
    )
    return (
        f"{incomplete if missing else ''}{len(records)} of {settings.num_records} records; "
        f"{settings.model}, {settings.engine}, float32. Every difference is to dense on the same "
        "items; in brackets 95 % intervals over items, Wilson's for shares of right answers and "
        "bootstrap for all else. An arm runs only items that are long enough for it to evict, and "
        f"each record's evictions are as its lengths demand ({preemptions} preemptions)."
        f"{unaffected}\n\n"
        "The column `evicted` has the tokens that each KV head dropped by the end of an item, "
        f"median over items. {NEARLY_DENSE}: fewer than the arm's buffer `r`. Such a row is next "
        "to dense, says next to nothing of the budget, and is left out of the plots.\n"
    )


def _text(records: Sequence[Record]) -> str:
    rows = [
        [
            row.arm.name,
            evicted(row),
            f"{row.num_tokens:,}",
            str(row.nll.num_values),
            f"{row.dense_nll.value:.3f}",
            f"{row.nll.value:.3f}",
            signed(row.nll_difference),
            row.agreement.text(),
        ]
        for row in comparison.text_rows(records)
    ]
    head = ["arm", "evicted", "tokens", "texts", "dense NLL", "NLL", "difference"]
    head.append("same argmax as dense")
    explained = (
        "Nats per token over tokens predicted after the arm's first eviction; rows of different "
        "budgets are over different tokens.\n\n"
    )
    differences = [
        [arm.name, signed(figure)] for arm, figure in comparison.window_differences(records)
    ]
    beside = "\n" + table(["arm", "NLL minus the window's"], differences) if differences else ""
    return explained + table(head, rows) + beside


def _bands(records: Sequence[Record]) -> str:
    rows = [
        [
            row.arm.name,
            f"{row.low} to {row.high - 1}",
            f"{row.num_tokens:,}",
            signed(row.nll_difference),
        ]
        for row in comparison.band_rows(records, BANDS)
    ]
    return table(["arm", "positions", "tokens", "NLL difference"], rows)


def _facts(records: Sequence[Record]) -> str:
    rows = []
    for task, where in (("prompt-fact", "prompt"), ("generated-fact", "generated text")):
        for right, nll in comparison.fact_rows(records, task):
            cells = [percent(right.dense), percent(right.value), percent(right.difference, True)]
            rows.append(
                [
                    where,
                    str(right.distance),
                    right.arm.name,
                    evicted(right),
                    str(right.value.num_values),
                    *cells,
                    signed(nll.difference, 2),
                ]
            )
    head = ["stated in", "tokens between", "arm", "evicted", "keys", "dense", "right", "points"]
    head.append("NLL/digit")
    return table(head, rows)


def _repetition(settings: Settings, records: Sequence[Record]) -> str:
    rows = comparison.repetition_rows(records)
    head = ["arm", "evicted", "tokens", "texts", "dense", "repeated", "difference"]
    explained = (
        f"Share of {comparison.NUM_REPEATED}-grams that occurred before in the same output of "
        f"{settings.free_len} tokens at temperature {settings.temperature}, of those that end at a "
        "token predicted after the arm's first eviction; of dense at the same positions, so rows "
        "of different budgets are over different tokens. Ends of text get no probability.\n\n"
    )
    return explained + table(head, [_repetition_cells(row) for row in rows])


def _repetition_cells(row: ScoreRow) -> list[str]:
    figures = [row.dense.text(), row.value.text(), signed(row.difference)]
    counts = [f"{row.num_affected:,}", str(row.value.num_values)]
    return [row.arm.name, evicted(row), *counts, *figures]
