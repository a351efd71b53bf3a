# SPDX-License-Identifier: Apache-2.0
"""A report of stored runs: Markdown, with plots beside it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.markdown import table
from benchmarks.serving import figures, plots, record
from benchmarks.serving.arms import DENSE
from benchmarks.serving.figures import Row
from benchmarks.serving.record import RefusedRunError, Run
from benchmarks.serving.workloads import WORKLOADS

_COLUMNS = (
    "arm",
    "compactor",
    "runs",
    "output tokens/s",
    "ratio to dense",
    "TTFT, s",
    "ITL, ms",
    "running",
    "KV blocks",
    "preemptions",
    "evicted pairs",
    "copied / evicted",
    "compaction",
)
_LEGEND = (
    "Medians over runs. Ratio: output tokens/s over those of the dense run with the same prompts, "
    "median of the pairs with its 95 % bootstrap interval, or with their range where there are "
    "fewer than six. TTFT and ITL: median and 99th percentile. Running: most requests at once, and "
    "the mean while there were any. KV blocks: most in use, of a sample a second. Compaction: its "
    "share of the wall time."
)


def write(directory: Path) -> Path:
    """Write ``report.md`` and the plots of the runs stored in `directory`.

    Raises:
        RefusedRunError: There is none, or one that must not be a result.
    """
    runs = record.load(directory)
    if not runs:
        raise RefusedRunError(f"{directory}: expected files called *{record.SUFFIX}, found none")
    grouped = figures.by_workload(runs)
    order = [*(name for name in WORKLOADS if name in grouped), *sorted(set(grouped) - {*WORKLOADS})]
    grouped = {name: grouped[name] for name in order}
    drawn = plots.draw(grouped, directory)
    parts = ["# Serving: the full cache against the policy", _machine(runs), _LEGEND]
    parts += [_workload(name, by_arm) for name, by_arm in grouped.items()]
    parts += [f"![{path.stem}]({path.name})" for path in drawn]
    parts.append(_commands(grouped))
    path = directory / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _machine(runs: Sequence[Run]) -> str:
    run = runs[0]
    hardware = run.hardware
    devices = ", ".join([hardware.cpu, *hardware.accelerators])
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    days = sorted({run.started_at[:10] for run in runs})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{when}; {hardware.num_cores} cores, {devices}, {hardware.memory_bytes / 2**30:.0f} GiB; "
        f"{versions}; patch {run.patch_digest}."
    )


def _workload(name: str, by_arm: Mapping[str, Sequence[Run]]) -> str:
    settings = next(iter(by_arm.values()))[0].settings
    tokens = settings.num_kv_blocks * settings.block_size
    lines = [
        f"## {name}",
        "",
        f"{settings.num_requests} requests at once, {settings.input_len} + {settings.output_len} "
        f"tokens, KV memory for {tokens:,} tokens; model {settings.model}.",
        "",
        table(_COLUMNS, map(_cells, figures.rows(by_arm))).rstrip(),
    ]
    for arm, runs in by_arm.items():
        growth = figures.growth_of_itl(runs)
        if growth is not None:
            lines += [
                "",
                f"{arm}: inter-token latency of the last 200 tokens over that at 500 tokens: "
                f"{growth.text()}.",
            ]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    is_dense = row.arm == DENSE
    copied = f"{row.copied_pairs / row.evicted_pairs:.3f}" if row.evicted_pairs else ""
    return [
        row.arm,
        "" if is_dense else row.compactor,
        str(row.num_runs),
        f"{row.tokens_per_second:.1f}",
        "1" if is_dense else row.ratio.text() if row.ratio else "",
        f"{row.ttft[0]:.2f}, {row.ttft[1]:.2f}",
        f"{1000 * row.itl[0]:.1f}, {1000 * row.itl[1]:.1f}",
        f"{row.most_running:.0f}, {row.mean_running:.1f}",
        f"{row.most_blocks:.0f}",
        f"{row.preemptions:.0f}",
        "" if is_dense else f"{row.evicted_pairs:,.0f}",
        copied,
        "" if is_dense else f"{row.compaction_share:.2%}",
    ]


def _commands(grouped: Mapping[str, Mapping[str, Sequence[Run]]]) -> str:
    lines = ["## Commands", "", "Of the first run of each arm; ports differ between runs.", ""]
    lines.append("```console")
    for by_arm in grouped.values():
        for runs in by_arm.values():
            environment = [f"{name}={value}" for name, value in runs[0].server_environment.items()]
            lines.append(f"$ {shlex.join([*environment, *runs[0].server_command])}")
            lines.append(f"$ {shlex.join(runs[0].client_command)}")
    lines.append("```")
    return "\n".join(lines)
