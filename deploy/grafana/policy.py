# SPDX-License-Identifier: Apache-2.0
"""The dashboard of the policy: what rounds do, what they save, what they cost."""

from __future__ import annotations

from panels import Panel, Query, Step, graph, names, number, quantiles
from promql import average, quantile, rate, rate_of_seen, rate_or_zero, ratio, series

UID = "randkv"
TITLE = "RandKV: policy"
DESCRIPTION = (
    "What the KV cache policy evicts and copies, the memory it saves, and what that costs."
)

_RANDKV = 'policy="randkv"'
_MAX_COPIED_PER_EVICTED = 1.05
_COPIED_STEPS = (Step("green"), Step("red", _MAX_COPIED_PER_EVICTED))
_SHARE_STEPS = (Step("green"), Step("orange", 0.01), Step("red", 0.05))

_EVICTED = rate("randkv_evicted_token_head_pairs_total")
_COPIED = rate("randkv_copied_token_head_pairs_total")
_SECONDS = series("randkv_compaction_seconds_sum")
_REPLAYED = rate("randkv_replayed_tokens_total")
_COMPUTED = " + ".join(
    (
        rate("vllm:prompt_tokens_by_source_total", 'source="local_compute"'),
        rate("vllm:generation_tokens_total"),
        _REPLAYED,
    )
)


def panels() -> dict[str, list[Panel]]:
    """Panels by the title of their row; those of the top row come first, under ``""``."""
    return {"": _top(), "Rounds": _rounds(), "KV cache": _kv_cache(), "Requests": _requests()}


def _top() -> list[Panel]:
    return [
        number(
            "Copied per evicted pair",
            "Token-head pairs that rounds copied for each one that they evicted: at most one.",
            Query("copied per evicted", ratio(_COPIED, _EVICTED)),
            unit="none",
            decimals=3,
            steps=_COPIED_STEPS,
        ),
        number(
            "Pairs evicted per second",
            "Token-head pairs of one layer each that rounds evict per second.",
            Query("evicted", _EVICTED),
            unit="short",
        ),
        number(
            "KV cache saved",
            "KV cache that the running requests would hold in addition, had they the full cache.",
            Query("saved", f"sum({series('randkv_saved_kv_bytes')})"),
            unit="bytes",
        ),
        number(
            "Tokens still held",
            "Share of their computed tokens that requests under RandKV held when they ended.",
            Query(
                "held",
                ratio(
                    rate("randkv_request_physical_tokens_sum", _RANDKV),
                    rate("randkv_request_absolute_tokens_sum", _RANDKV),
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
        number(
            "Time in compaction",
            "Share of an engine's time that rounds take, average over the engines.",
            Query("compaction", f"avg(rate({_SECONDS}[$__rate_interval]))"),
            unit="percentunit",
            decimals=2,
            steps=_SHARE_STEPS,
        ),
        number(
            "Tokens replayed",
            "Share of the computed tokens that were computed again, after a preemption.",
            Query("replayed", ratio(_REPLAYED, _COMPUTED)),
            unit="percentunit",
            decimals=1,
            steps=_SHARE_STEPS,
        ),
    ]


def _rounds() -> list[Panel]:
    return [
        graph(
            "Token-head pairs per second",
            "Pairs that rounds evict and copy; the lines lie on each other, or copied is lower.",
            Query("evicted", _EVICTED),
            Query("copied", _COPIED),
            unit="short",
            soft_maximum=1,
        ),
        graph(
            "Copied per evicted pair",
            "Above the dashed line rounds move more than they have to.",
            Query("copied per evicted", ratio(_COPIED, _EVICTED)),
            unit="none",
            decimals=2,
            steps=(Step("transparent"), Step("red", _MAX_COPIED_PER_EVICTED)),
            soft_maximum=1.2,
            joined=True,
        ),
        graph(
            "Rounds per second",
            "Rounds carried out; replayed ones are carried out again, after a preemption.",
            Query("first time", rate("randkv_compaction_rounds_total", 'replay="false"')),
            Query("replayed", rate("randkv_compaction_rounds_total", 'replay="true"')),
            unit="short",
            soft_maximum=1,
        ),
        graph(
            "Time in compaction",
            "Share of each server's time that rounds take, average over its engines.",
            Query("{{instance}}", f"avg by (instance) (rate({_SECONDS}[$__rate_interval]))"),
            unit="percentunit",
            soft_maximum=0.001,
        ),
        quantiles(
            "Time of a step's rounds",
            "How long the rounds of one engine step take, on the reporting rank.",
            "randkv_compaction_seconds",
        ),
        graph(
            "Tokens replayed",
            "Share of the computed tokens that were computed again, after a preemption.",
            Query("replayed", ratio(_REPLAYED, _COMPUTED)),
            unit="percentunit",
            soft_maximum=0.01,
            joined=True,
        ),
    ]


def _kv_cache() -> list[Panel]:
    return [
        graph(
            "Tokens of a request under RandKV, average",
            "Computed tokens of requests that ended, slots they then held, the default's bound.",
            Query("computed", average("randkv_request_absolute_tokens", _RANDKV)),
            Query("held", average("randkv_request_physical_tokens", _RANDKV)),
            Query("bound by default", f"max({series('randkv_default_bound_tokens')})"),
            unit="short",
            joined=True,
        ),
        graph(
            "Tokens of a request under RandKV, p95",
            "As on the left, for the longest twentieth; read from buckets of powers of two.",
            Query("computed", quantile(0.95, "randkv_request_absolute_tokens", _RANDKV)),
            Query("held", quantile(0.95, "randkv_request_physical_tokens", _RANDKV)),
            unit="short",
            joined=True,
        ),
        graph(
            "KV cache saved",
            "KV cache that the running requests would hold in addition, had they the full cache.",
            Query("{{instance}}", f"sum by (instance) ({series('randkv_saved_kv_bytes')})"),
            unit="bytes",
            soft_maximum=2**20,
            stacked=True,
        ),
        graph(
            "Blocks freed per second",
            "KV cache blocks that rounds returned to the pool.",
            Query("freed", rate("randkv_freed_blocks_total")),
            unit="short",
            soft_maximum=1,
        ),
        graph(
            "Cached blocks written to, per second",
            "Blocks that a round writes to: copied because others use them, or uncached.",
            Query("copied on write", rate("randkv_copied_on_write_blocks_total")),
            Query("uncached", rate("randkv_uncached_blocks_total")),
            unit="short",
            soft_maximum=1,
        ),
        graph(
            "Plans dropped per second",
            "Rounds planned but not carried out, their request having been preempted.",
            Query("dropped", rate("randkv_dropped_plans_total")),
            unit="short",
            soft_maximum=0.1,
        ),
    ]


def _requests() -> list[Panel]:
    build = "by (version, vllm_version, compactor, patch)"
    return [
        graph(
            "Requests running",
            "Requests in the running batch, by their policy.",
            Query("{{policy}}", f"sum by (policy) ({series('randkv_running_requests')})"),
            unit="short",
            soft_maximum=1,
            stacked=True,
        ),
        graph(
            "Requests ended per second",
            "Requests for generation, by policy and by how they ended.",
            Query(
                "{{policy}}: {{outcome}}", rate_of_seen("randkv_requests_total", "policy, outcome")
            ),
            unit="reqps",
            soft_maximum=0.1,
            stacked=True,
        ),
        graph(
            "Overrides refused per second",
            "Requests refused because of their kv_cache_policy, by reason.",
            Query("all", rate_or_zero("randkv_refused_overrides_total")),
            Query("{{reason}}", rate_of_seen("randkv_refused_overrides_total", "reason")),
            unit="reqps",
            soft_maximum=0.1,
        ),
        names(
            "Builds",
            "What runs here; more than one name means that servers differ.",
            Query(
                "RandKV {{version}} in vLLM {{vllm_version}}, compactor {{compactor}}, "
                "patch {{patch}}",
                f"count {build} ({series('randkv_build_info')})",
            ),
        ),
    ]
