# SPDX-License-Identifier: Apache-2.0
"""Paired differences between arms, from records alone. Pure numpy.

A value is always of one item; intervals are over items. Positions are those of predicted tokens,
from the start of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import spread
from benchmarks.quality import repetition, retrieval
from benchmarks.quality.arm import DENSE, Arm
from benchmarks.quality.item import Task
from benchmarks.quality.record import Record

NUM_REPEATED = 4
"""Length of the n-grams whose repetition is counted; tokens."""


class Pair(NamedTuple):
    """The same item under an arm and under another, usually dense."""

    arm: Record
    other: Record


class TextRow(NamedTuple):
    """One arm on held-out text, over positions from its first eviction on.

    Attributes:
        evicted: Tokens per KV head, median over items.
        num_tokens: Positions, all texts together.
        nll: Nats per token.
        dense_nll: Of dense at the same positions.
        nll_difference: Arm minus dense.
        agreement: Share of positions with dense's argmax.
    """

    arm: Arm
    evicted: int
    num_tokens: int
    nll: spread.Figure
    dense_nll: spread.Figure
    nll_difference: spread.Figure
    agreement: spread.Figure


class BandRow(NamedTuple):
    """NLL of an arm minus dense over positions ``low .. high - 1``; nats per token."""

    arm: Arm
    low: int
    high: int
    num_tokens: int
    nll_difference: spread.Figure


class ScoreRow(NamedTuple):
    """One score of an arm, of dense on the same items, and the difference.

    Attributes:
        distance: Filler tokens between fact and question, else 0.
        evicted: Tokens per KV head, median over items.
        num_affected: Scored tokens that were predicted from a compacted cache, all items together.
        value: Of the arm.
        dense: On the same items.
        difference: Arm minus dense.
    """

    arm: Arm
    distance: int
    evicted: int
    num_affected: int
    value: spread.Figure
    dense: spread.Figure
    difference: spread.Figure


def pairs(records: Iterable[Record], task: Task, arm: Arm, other: Arm = DENSE) -> list[Pair]:
    """Items of `task` that both arms ran, ordered by item."""
    chosen = [r for r in records if r.task == task]
    others = {r.key: r for r in chosen if r.arm == other}
    found = {r.key: r for r in chosen if r.arm == arm}
    return [Pair(found[key], others[key]) for key in sorted(found) if key in others]


def policy_arms(records: Iterable[Record]) -> list[Arm]:
    """Every arm but dense: RandKV, then windows, by budget and buffer size."""
    found = {record.arm for record in records if not record.arm.is_dense}
    return sorted(found, key=lambda arm: (arm.kind, arm.budget, arm.buffer_size))


def is_nearly_dense(row: TextRow | ScoreRow) -> bool:
    """Whether fewer tokens were evicted than the buffer holds: too few to say much of the arm."""
    return row.evicted < row.arm.buffer_size


def _evicted(found: Iterable[Pair]) -> int:
    return median_low(pair.arm.evicted_tokens for pair in found)


def _affected(pair: Pair) -> slice:
    """Output tokens that were predicted from a compacted cache."""
    return slice(pair.arm.arm.first_affected(pair.arm.prompt_len), None)


def _nll(record: Record, where: slice) -> float:
    return -float(np.mean(record.logprobs[where]))


def _agreement(pair: Pair, where: slice) -> float:
    ours, theirs = (np.asarray(record.top_tokens[where]) for record in pair)
    return float(np.mean(ours == theirs))


def text_rows(records: Sequence[Record]) -> list[TextRow]:
    """Every policy arm against dense."""
    rows = []
    for arm in policy_arms(records):
        found = [(pair, _affected(pair)) for pair in pairs(records, "text", arm)]
        if not found:
            continue
        nll = [_nll(pair.arm, where) for pair, where in found]
        dense = [_nll(pair.other, where) for pair, where in found]
        rows.append(
            TextRow(
                arm,
                _evicted(pair for pair, _ in found),
                sum(len(pair.arm.tokens[where]) for pair, where in found),
                spread.mean(nll),
                spread.mean(dense),
                spread.mean(_minus(nll, dense)),
                spread.mean([_agreement(pair, where) for pair, where in found]),
            )
        )
    return rows


def window_differences(records: Sequence[Record]) -> list[tuple[Arm, spread.Figure]]:
    """NLL of RandKV minus that of the window of the same size; nats per token."""
    rows = []
    for arm in policy_arms(records):
        window = arm.model_copy(update={"kind": "window"})
        found = pairs(records, "text", arm, window) if arm.kind == "randkv" else []
        ours = [_nll(pair.arm, _affected(pair)) for pair in found]
        others = [_nll(pair.other, _affected(pair)) for pair in found]
        if found:
            rows.append((arm, spread.mean(_minus(ours, others))))
    return rows


def band_rows(records: Sequence[Record], edges: Sequence[int]) -> list[BandRow]:
    """By bands between `edges`, positions; an arm's bands end with all after its first eviction."""
    rows = []
    for arm in policy_arms(records):
        found = pairs(records, "text", arm)
        for low, high in pairwise(edges):
            values, count = [], 0
            for pair in found:
                prompt_len = pair.arm.prompt_len
                first = max(low - prompt_len, arm.first_affected(prompt_len), 0)
                place = slice(first, high - prompt_len)
                num_tokens = len(pair.arm.tokens[place])
                if first < high - prompt_len and num_tokens:
                    values.append(_nll(pair.arm, place) - _nll(pair.other, place))
                    count += num_tokens
            if values:
                rows.append(BandRow(arm, low, high, count, spread.mean(values)))
    return rows


def largest_early_difference(records: Sequence[Record]) -> float | None:
    """Largest log-probability difference to dense before an arm's first eviction; nats.

    Nothing but rounding, if nothing but evictions separates the arms. None where there is nothing
    to compare.
    """
    found: list[float] = []
    for arm in policy_arms(records):
        for pair in pairs(records, "text", arm):
            early = slice(0, arm.first_affected(pair.arm.prompt_len))
            ours, theirs = (np.asarray(record.logprobs[early]) for record in pair)
            found += np.abs(ours - theirs).tolist()
    return max(found, default=None)


def score_rows(
    records: Sequence[Record],
    task: Task,
    score: Callable[[Record, int], float],
    figure: Callable[[Sequence[float]], spread.Figure],
) -> list[ScoreRow]:
    """By arm and distance.

    Args:
        records: Of all arms and tasks.
        task: Whose items.
        score: Of a record, arm's or dense's, and the output index from which on the arm differs.
        figure: Sums up one arm's scores.
    """
    rows = []
    for arm in policy_arms(records):
        found = pairs(records, task, arm)
        for distance in sorted({pair.arm.distance for pair in found}):
            at = [pair for pair in found if pair.arm.distance == distance]
            firsts = [arm.first_affected(pair.arm.prompt_len) for pair in at]
            ours = [float(score(pair.arm, first)) for pair, first in zip(at, firsts, strict=True)]
            dense = [
                float(score(pair.other, first)) for pair, first in zip(at, firsts, strict=True)
            ]
            num_affected = sum(
                pair.arm.output_len - max(first, pair.arm.first_scored)
                for pair, first in zip(at, firsts, strict=True)
            )
            figures = (figure(ours), figure(dense), spread.mean(_minus(ours, dense)))
            rows.append(ScoreRow(arm, distance, _evicted(at), num_affected, *figures))
    return rows


def fact_rows(records: Sequence[Record], task: Task) -> list[tuple[ScoreRow, ScoreRow]]:
    """Share of right answers, and NLL per digit."""
    right = score_rows(records, task, lambda record, _: retrieval.is_right(record), spread.share)
    nll = score_rows(records, task, lambda record, _: retrieval.nll(record), spread.mean)
    return list(zip(right, nll, strict=True))


def repetition_rows(records: Sequence[Record]) -> list[ScoreRow]:
    """Share of repeated n-grams in free generation, of those that end where the arm differs.

    Before that the arm's output is dense's, and would only dilute the difference.
    """

    def score(record: Record, first: int) -> float:
        return repetition.repeated_share(record.tokens, NUM_REPEATED, first)

    return score_rows(records, "free", score, spread.mean)


def _minus(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    difference: NDArray[np.float64] = np.subtract(ours, others)
    return difference.tolist()
