# SPDX-License-Identifier: Apache-2.0
"""Figures of stored runs. Pure: what a report and its plots show is computed here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks import spread
from benchmarks.serving.arms import DENSE
from benchmarks.serving.record import RefusedRunError, Run
from benchmarks.spread import Figure

EARLY = (400, 600)
"""Output tokens around 500, whose inter-token latency is compared with that of the last 200."""
MIN_LONG_OUTPUT = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One arm of one workload; medians over its runs.

    Attributes:
        ratio: Output tokens/s over those of the dense run with the same prompts; None for dense
            itself, and where no dense run was stored.
        ttft: Median and 99th percentile over the requests of a run, seconds.
        itl: Median and 99th percentile over the tokens of a run, seconds.
        compaction_share: Of the wall time.
    """

    arm: str
    compactor: str
    num_runs: int
    tokens_per_second: float
    ratio: Figure | None
    ttft: tuple[float, float]
    itl: tuple[float, float]
    most_running: float
    mean_running: float
    most_blocks: float
    preemptions: float
    evicted_pairs: float
    copied_pairs: float
    compaction_share: float


def tokens_per_second(run: Run) -> float:
    """Output tokens/s."""
    return sum(request.output_len for request in run.requests) / run.seconds


def by_workload(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """Runs by workload and arm, dense first, in the order of their pairs.

    Raises:
        RefusedRunError: Runs that make no comparison: other loads, prompts, machines or versions.
    """
    grouped: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: (rank(run.settings.arm), run.pair)):
        grouped[run.settings.workload][run.settings.arm].append(run)
    for workload, arms in grouped.items():
        every = [run for same in arms.values() for run in same]
        have_one_load = all(run.settings.load == every[0].settings.load for run in every)
        if not have_one_load or any(
            run.settings != same[0].settings for same in arms.values() for run in same
        ):
            raise RefusedRunError(f"{workload}: runs of different settings make no comparison")
        lengths = {
            (run.pair, run.seed, tuple((r.input_len, r.output_len) for r in run.requests))
            for run in every
        }
        if len(lengths) != len({run.pair for run in every}):
            raise RefusedRunError(f"{workload}: runs of one pair had different prompts or lengths")
    machines = {
        (run.hardware.model_dump_json(), run.patch_digest, *sorted(run.versions.items()))
        for run in runs
    }
    if len(machines) > 1:
        raise RefusedRunError("runs of different machines or versions make no comparison")
    return grouped


def rank(arm: str) -> tuple[str, int]:
    """Sorts arms: dense, then by kind and budget."""
    kind, _, budget = arm.partition("-")
    return ("" if arm == DENSE else kind, int(budget or 0))


def rows(arms: Mapping[str, Sequence[Run]]) -> list[Row]:
    """One row per arm of one workload."""
    dense = {run.pair: run for run in arms.get(DENSE, ())}
    found = []
    for arm, runs in arms.items():
        ratios = [
            tokens_per_second(run) / tokens_per_second(dense[run.pair])
            for run in runs
            if run.pair in dense
        ]
        found.append(
            Row(
                arm,
                runs[0].compactor,
                len(runs),
                median(map(tokens_per_second, runs)),
                spread.median(ratios) if ratios and arm != DENSE else None,
                _percentiles([[r.ttft for r in run.requests] for run in runs]),
                _percentiles([[x for r in run.requests for x in r.itls] for run in runs]),
                median(max((s.num_running for s in run.samples), default=0) for run in runs),
                median(_mean(_busy(run)) for run in runs),
                median(most_blocks(run) for run in runs),
                median(run.grown("vllm:num_preemptions_total") for run in runs),
                median(run.grown("randkv_evicted_token_head_pairs_total") for run in runs),
                median(run.grown("randkv_copied_token_head_pairs_total") for run in runs),
                median(run.grown("randkv_compaction_seconds_sum") / run.seconds for run in runs),
            )
        )
    return found


def most_blocks(run: Run) -> float:
    """Most KV blocks in use at once, as far as the samples saw."""
    return max((s.kv_usage for s in run.samples), default=0.0) * run.settings.num_kv_blocks


def _busy(run: Run) -> list[float]:
    """Running requests of the samples between the first request and the last token."""
    return [s.num_running for s in run.samples if s.num_running + s.num_waiting]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentiles(by_run: Sequence[Sequence[float]]) -> tuple[float, float]:
    each = [np.percentile(values, [50, 99]) for values in by_run if values]
    middle, high = np.median(each, axis=0) if each else (0.0, 0.0)
    return float(middle), float(high)


def growth_of_itl(runs: Sequence[Run]) -> Figure | None:
    """Median inter-token latency of the last 200 tokens over that at 500 tokens.

    None where outputs are short, or several requests share a step.
    """
    ratios = []
    for run in runs:
        if len(run.requests) != 1 or run.requests[0].output_len < MIN_LONG_OUTPUT:
            return None
        itls = run.requests[0].itls
        ratios.append(median(itls[-200:]) / median(itls[slice(*EARLY)]))
    return spread.median(ratios)
