# SPDX-License-Identifier: Apache-2.0
"""The dashboard of the service: traffic, latency, the engine's room, and what goes wrong."""

from __future__ import annotations

from panels import Panel, Query, Step, graph, number, quantiles
from promql import WINDOW, of_servers, quantile, rate, rate_of_seen, rate_or_zero, ratio, series

UID = "randkv-serving"
TITLE = "RandKV: serving"
DESCRIPTION = "Traffic, latency, queue, KV cache and failures of the servers."

_ENDED = rate("randkv_requests_total")
_FAILED = 'outcome=~"error|refused"'


def panels() -> dict[str, list[Panel]]:
    """Panels by the title of their row; those of the top row come first, under ``""``."""
    return {
        "": _top(),
        "Traffic": _traffic(),
        "Latency": _latency(),
        "Engine": _engine(),
        "Failures": _failures(),
    }


def _top() -> list[Panel]:
    known = "count({})".format(of_servers('up{instance=~"$instance"}'))
    return [
        number(
            "Servers ready",
            "Share of the servers that take new requests.",
            Query("ready", f"(sum({series('randkv_ready')}) or 0 * {known}) / {known}"),
            unit="percentunit",
            steps=(Step("red"), Step("green", 1)),
            no_value="none known",
            maximum=1,
        ),
        number(
            "Requests per second",
            "Requests for generation that ended, however they did.",
            Query("requests", f"{_ENDED} or 0 * max({series('randkv_build_info')})"),
            unit="reqps",
        ),
        number(
            "Tokens per second",
            "Tokens generated per second, all requests together.",
            Query("generated", rate("vllm:generation_tokens_total")),
            unit="short",
        ),
        number(
            "Time to first token, p95",
            "Nineteen of twenty requests had their first token by then.",
            Query("p95", quantile(0.95, "vllm:time_to_first_token_seconds")),
            unit="s",
            steps=(Step("green"), Step("orange", 2), Step("red", 10)),
        ),
        number(
            "KV cache in use",
            "Share of the KV cache's blocks in use, in the fullest engine.",
            Query("in use", f"max({series('vllm:kv_cache_usage_perc')})"),
            unit="percentunit",
            steps=(Step("green"), Step("orange", 0.8), Step("red", 0.95)),
            no_value="no server",
            maximum=1,
        ),
        number(
            "Failed or refused",
            "Share of the requests for generation that ended in an error or were refused.",
            Query(
                "failed",
                ratio(
                    rate_or_zero("randkv_requests_total", _FAILED),
                    _ENDED,
                ),
            ),
            unit="percentunit",
            decimals=1,
            steps=(Step("green"), Step("orange", 0.01), Step("red", 0.05)),
            maximum=1,
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        graph(
            "Requests ended per second",
            "Requests for generation, by how they ended.",
            Query("{{outcome}}", rate_of_seen("randkv_requests_total", "outcome")),
            unit="reqps",
            soft_maximum=0.1,
            stacked=True,
        ),
        graph(
            "Tokens per second",
            "Tokens of prompts (those from the prefix cache too) and generated tokens.",
            Query("prompt", rate("vllm:prompt_tokens_total")),
            Query("generated", rate("vllm:generation_tokens_total")),
            unit="short",
            soft_maximum=1,
        ),
        graph(
            "Requests in the engine",
            "Requests in the running batch, and those that wait to get in.",
            Query("running", f"sum({series('vllm:num_requests_running')})"),
            Query("waiting", f"sum({series('vllm:num_requests_waiting')})"),
            unit="short",
            soft_maximum=1,
        ),
    ]


def _latency() -> list[Panel]:
    return [
        quantiles(
            "Time to first token",
            "From the arrival of a request to its first token.",
            "vllm:time_to_first_token_seconds",
        ),
        quantiles(
            "Time between tokens",
            "From one token of a request to its next.",
            "vllm:inter_token_latency_seconds",
        ),
        quantiles(
            "Time of a request",
            "From the arrival of a request to its end.",
            "vllm:e2e_request_latency_seconds",
        ),
    ]


def _engine() -> list[Panel]:
    return [
        graph(
            "KV cache in use",
            "Share of the KV cache's blocks in use, in each server's fullest engine.",
            Query(
                "{{instance}}",
                f"max by (instance) ({series('vllm:kv_cache_usage_perc')})",
            ),
            unit="percentunit",
            maximum=1,
            span=6,
        ),
        graph(
            "Prefix cache hits",
            "Share of the tokens asked of the prefix cache that it had.",
            Query(
                "hits",
                ratio(
                    rate("vllm:prefix_cache_hits_total"),
                    rate("vllm:prefix_cache_queries_total"),
                ),
            ),
            unit="percentunit",
            maximum=1,
            joined=True,
            span=6,
        ),
        graph(
            "Preemptions per second",
            "Requests put back into the queue because the KV cache was full.",
            Query("preemptions", rate("vllm:num_preemptions_total")),
            unit="short",
            soft_maximum=0.1,
            span=6,
        ),
        quantiles(
            "Time in the queue",
            "From arrival in the engine to the first step; a guess below 0.3 s, the least bucket.",
            "vllm:request_queue_time_seconds",
            span=6,
        ),
    ]


def _failures() -> list[Panel]:
    scraped = f'avg_over_time(up{{instance=~"$instance"}}{WINDOW})'
    ready = f"avg_over_time({series('randkv_ready')}{WINDOW})"
    return [
        graph(
            "Requests without a full answer, per second",
            "Errors of the server, requests that were refused, and those that clients left.",
            *(
                Query(legend, rate_or_zero("randkv_requests_total", f'outcome="{outcome}"'))
                for legend, outcome in (
                    ("error", "error"),
                    ("refused", "refused"),
                    ("left by the client", "abort"),
                )
            ),
            unit="reqps",
            soft_maximum=0.1,
        ),
        graph(
            "Requests refused per second, by reason",
            "Requests that did not reach the engine; policy: because of their kv_cache_policy.",
            Query("all but policy", rate_or_zero("randkv_refused_requests_total")),
            Query("{{reason}}", rate_of_seen("randkv_refused_requests_total", "reason")),
            Query("policy: {{reason}}", rate_of_seen("randkv_refused_overrides_total", "reason")),
            unit="reqps",
            soft_maximum=0.1,
        ),
        graph(
            "Up and ready",
            "Share of the scrapes that were answered, and of those that found the server ready.",
            Query("up: {{instance}}", f"min by (instance) ({of_servers(scraped)})"),
            Query("ready: {{instance}}", f"min by (instance) ({ready})"),
            unit="percentunit",
            maximum=1,
            stepped=True,
        ),
    ]
