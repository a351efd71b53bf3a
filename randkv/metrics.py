# SPDX-License-Identifier: Apache-2.0
"""Every metric, declared once. ``python -m randkv.metrics`` prints docs/metrics.md."""

from __future__ import annotations

import sys
from typing import Any, Literal, NamedTuple, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from randkv.errors import RefusalReason
from randkv.stats import CompactionStats, FinishedRequest, PolicyStats

_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0)
_TOKENS = tuple(float(2**i) for i in range(5, 18))

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One family of ``/metrics``. Counters get the suffix ``_total`` there.

    Attributes:
        counted_by: The part that did the work: scheduler, worker or front end.
        labels: Besides ``model_name``; what comes from an engine has ``engine``, its data-parallel
            rank, as vLLM's own metrics do.
        of_processes: What a gauge is, of the values of several API server processes. An engine
            reports to one of them at a time.
    """

    name: str
    kind: Kind
    counted_by: Literal["scheduler", "worker", "front end"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    of_processes: Literal["mostrecent", "min"] = "mostrecent"


METRICS = (
    Metric(
        "randkv_compaction_rounds",
        "counter",
        "scheduler",
        "Rounds carried out. replay=true: again, after a preemption.",
        ("engine", "replay"),
    ),
    Metric(
        "randkv_evicted_token_head_pairs",
        "counter",
        "worker",
        "(token, KV head) pairs of one layer each that rounds evicted, summed over ranks.",
        ("engine",),
    ),
    Metric(
        "randkv_copied_token_head_pairs",
        "counter",
        "worker",
        "(token, KV head) pairs of one layer each that rounds copied, summed over ranks.",
        ("engine",),
    ),
    Metric(
        "randkv_compaction_seconds",
        "histogram",
        "worker",
        "Time of a step's rounds on the reporting rank; its host's, on a GPU the device's.",
        ("engine",),
        _SECONDS,
    ),
    Metric(
        "randkv_freed_blocks",
        "counter",
        "scheduler",
        "KV cache blocks that rounds returned to the pool.",
        ("engine",),
    ),
    Metric(
        "randkv_copied_on_write_blocks",
        "counter",
        "scheduler",
        "Shared KV cache blocks that were copied because a round writes to them.",
        ("engine",),
    ),
    Metric(
        "randkv_uncached_blocks",
        "counter",
        "scheduler",
        "Blocks taken out of the prefix cache because a round writes to them.",
        ("engine",),
    ),
    Metric(
        "randkv_dropped_plans",
        "counter",
        "scheduler",
        "Rounds planned but not carried out, their request having been preempted.",
        ("engine",),
    ),
    Metric(
        "randkv_replayed_tokens",
        "counter",
        "scheduler",
        "Tokens computed again after preemptions.",
        ("engine",),
    ),
    Metric(
        "randkv_request_absolute_tokens",
        "histogram",
        "scheduler",
        "Computed tokens of a request when it left the engine, finished or aborted.",
        ("engine", "policy"),
        _TOKENS,
    ),
    Metric(
        "randkv_request_physical_tokens",
        "histogram",
        "scheduler",
        "Slots of a request in the KV cache when it left the engine, finished or aborted.",
        ("engine", "policy"),
        _TOKENS,
    ),
    Metric(
        "randkv_running_requests",
        "gauge",
        "scheduler",
        "Requests in the running batch.",
        ("engine", "policy"),
    ),
    Metric(
        "randkv_saved_kv_bytes",
        "gauge",
        "scheduler",
        "KV cache that the running requests would hold beyond what they do, had they the full "
        "cache; bytes of whole blocks on rank 0.",
        ("engine",),
    ),
    Metric(
        "randkv_requests",
        "counter",
        "front end",
        "HTTP requests for generation, by policy and by how they ended.",
        ("policy", "outcome"),
    ),
    Metric(
        "randkv_refused_overrides",
        "counter",
        "front end",
        "Requests refused because of their kv_cache_policy.",
        ("reason",),
    ),
    Metric(
        "randkv_refused_requests",
        "counter",
        "front end",
        "Requests refused before the engine saw them, for reasons other than the policy.",
        ("reason",),
    ),
    Metric(
        "randkv_ready",
        "gauge",
        "front end",
        "What /ready answers: 1, new requests are taken; 0, draining, or the engine is dead. "
        "Of several API server processes the least.",
        of_processes="min",
    ),
    Metric(
        "randkv_default_bound_tokens",
        "gauge",
        "front end",
        "Most slots that a request of the default policy ever has in the KV cache. No series where "
        "the default is dense.",
    ),
    Metric(
        "randkv_build_info",
        "gauge",
        "front end",
        "Always 1; what runs here.",
        ("version", "vllm_version", "patch", "compactor"),
    ),
)

OUTCOMES = ("stop", "length", "abort", "error", "refused")
POLICY_REFUSALS = get_args(RefusalReason)
REFUSALS = ("authentication", "route", "malformed", "too_large", "limit", "overload", "draining")


class Metrics:
    """The collectors of one process. With several, prometheus_client adds them up.

    Args:
        model_name: The served name.
        registry: Where the collectors are registered.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self.model_name = model_name
        self._collectors = {metric.name: _collector(metric, registry) for metric in METRICS}

    def family(self, name: str, **labels: str) -> Any:
        """The child of family `name` with these labels, to count on."""
        return self._collectors[name].labels(model_name=self.model_name, **labels)

    def start_engine(self, engine: str) -> None:
        """Show every series of an engine from the beginning, at zero."""
        self.record(engine, PolicyStats())
        for policy in ("randkv", "dense"):
            self.family("randkv_request_absolute_tokens", engine=engine, policy=policy)
            self.family("randkv_request_physical_tokens", engine=engine, policy=policy)

    def start_front_end(self) -> None:
        """Show every counter from the beginning, at zero.

        One that appears with its first count has no rate until the second.
        """
        for policy in ("randkv", "dense", "none"):
            for outcome in OUTCOMES:
                self.family("randkv_requests", policy=policy, outcome=outcome)
        for reason in POLICY_REFUSALS:
            self.family("randkv_refused_overrides", reason=reason)
        for reason in REFUSALS:
            self.family("randkv_refused_requests", reason=reason)

    def record(self, engine: str, stats: PolicyStats) -> None:
        """Add what an engine reports. `engine` is its data-parallel rank."""
        counts = {
            "randkv_freed_blocks": stats.freed_blocks,
            "randkv_copied_on_write_blocks": stats.copied_blocks,
            "randkv_uncached_blocks": stats.uncached_blocks,
            "randkv_dropped_plans": stats.dropped_plans,
            "randkv_replayed_tokens": stats.replayed_tokens,
            "randkv_evicted_token_head_pairs": stats.compaction.evicted_pairs,
            "randkv_copied_token_head_pairs": stats.compaction.copied_pairs,
        }
        for name, count in counts.items():
            self.family(name, engine=engine).inc(count)
        rounds = "randkv_compaction_rounds"
        self.family(rounds, engine=engine, replay="false").inc(stats.rounds)
        self.family(rounds, engine=engine, replay="true").inc(stats.replayed_rounds)
        for seconds in stats.compaction.seconds:
            self.family("randkv_compaction_seconds", engine=engine).observe(seconds)
        for policy, absolute, physical in stats.finished:
            labels = {"engine": engine, "policy": policy}
            self.family("randkv_request_absolute_tokens", **labels).observe(absolute)
            self.family("randkv_request_physical_tokens", **labels).observe(physical)
        for policy in ("randkv", "dense"):
            running = self.family("randkv_running_requests", engine=engine, policy=policy)
            running.set(stats.running.get(policy, 0))
        self.family("randkv_saved_kv_bytes", engine=engine).set(stats.saved_kv_bytes)


def from_dict(value: dict[str, Any]) -> PolicyStats:
    """Inverse of ``dataclasses.asdict``, for what has crossed a process boundary."""
    fields = dict(value)
    fields["compaction"] = CompactionStats(**fields["compaction"])
    fields["finished"] = [FinishedRequest(*finished) for finished in fields["finished"]]
    return PolicyStats(**fields)


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    common: dict[str, Any] = {
        "name": metric.name,
        "documentation": metric.help,
        "labelnames": ("model_name", *metric.labels),
        "registry": registry,
    }
    if metric.kind == "counter":
        return Counter(**common)
    if metric.kind == "histogram":
        return Histogram(**common, buckets=metric.buckets)
    return Gauge(**common, multiprocess_mode=metric.of_processes)


def to_markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "On `/metrics`, beside vLLM's own. Every family has the label `model_name`; `engine` is",
        "the data-parallel rank. This page is made by `python -m randkv.metrics`.",
        "",
        "| metric | type | labels | counted by | what it says |",
        "| --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS:
        name = metric.name + ("_total" if metric.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        row = f"`{name}` | {metric.kind} | {labels} | {metric.counted_by} | {metric.help}"
        lines.append(f"| {row} |")
    lines += [
        "",
        "Every rank of an engine counts the pairs of its own layers and KV heads. A replica of a",
        "KV head (fewer KV heads than tensor-parallel ranks) is moved, and counts, on each of its",
        "ranks. With several ranks, and on a GPU, pairs arrive within a second, or when no request",
        "is running. The reporting rank is the first of the last pipeline stage.",
        "",
        "Values of the bounded labels:",
        "",
        "- `policy`: `randkv`, `dense`; `none` for a request refused before it had one",
        f"- `outcome`: {', '.join(f'`{outcome}`' for outcome in OUTCOMES)}",
        "- `reason` of refused overrides: "
        f"{', '.join(f'`{reason}`' for reason in POLICY_REFUSALS[:4])},",
        f"  {', '.join(f'`{reason}`' for reason in POLICY_REFUSALS[4:])}",
        f"- `reason` of refused requests: {', '.join(f'`{reason}`' for reason in REFUSALS[:5])},",
        f"  {', '.join(f'`{reason}`' for reason in REFUSALS[5:])}",
        "",
        "Buckets of the histograms:",
        "",
    ]
    for metric in METRICS:
        if metric.kind == "histogram":
            bounds = ", ".join(f"{bound:g}" for bound in metric.buckets)
            lines.append(f"- `{metric.name}`: {bounds}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
