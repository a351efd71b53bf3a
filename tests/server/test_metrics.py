# SPDX-License-Identifier: Apache-2.0
"""``/metrics`` tells what the engine did: it equals what the answers report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from randkv import patching
from randkv.metrics import (
    METRICS,
    OUTCOMES,
    POLICY_REFUSALS,
    REFUSALS,
    Metrics,
    from_dict,
    to_markdown,
)
from randkv.stats import CompactionStats, FinishedRequest, PolicyStats
from tests.server.process import REPOSITORY, Server, free_port

LAYERS_TIMES_HEADS = 2 * 2


def test_the_page_of_metrics_is_the_declared_one() -> None:
    assert (REPOSITORY / "docs" / "metrics.md").read_text() == to_markdown()


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric: object) -> None:
    name, kind = metric.name, metric.kind  # type: ignore[attr-defined]
    assert re.fullmatch(r"randkv_[a-z]+(_[a-z]+)*", name)
    assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert "vllm" not in name  # vLLM drops what carries its name
    if kind == "histogram":
        assert name.endswith(("_seconds", "_tokens"))


def test_every_family_is_on_the_page_from_the_start(server: Server) -> None:
    text = server.metrics().text
    for metric in METRICS:
        assert f"# TYPE {metric.name}" in text
    assert "vllm:num_requests_running" in text


def test_counters_equal_the_sum_of_the_answers(server: Server) -> None:
    before = server.metrics()
    policies = [{"type": "randkv", "budget": 64, "buffer_size": r} for r in (0, 8, 32)] + ["dense"]

    def ask(number: int) -> dict[str, object]:
        reply = server.chat(
            kv_cache_policy=policies[number % 4], max_tokens=150 + number, ignore_eos=True
        )
        assert reply.status == 200, reply.body
        report: dict[str, object] = reply.json["kv_cache"]
        return report

    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(ask, range(12)))
    after = server.metrics()

    def gained(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    def summed(name: str) -> int:
        return sum(int(str(report[name])) for report in reports)

    assert summed("preemptions") == 0
    assert gained("randkv_compaction_rounds_total", replay="false") == summed("rounds") > 0
    assert gained("randkv_compaction_rounds_total", replay="true") == 0
    pairs = LAYERS_TIMES_HEADS * summed("evicted_tokens")
    assert gained("randkv_evicted_token_head_pairs_total") == pairs
    # r = 0: the evicted slot may be the last, which needs no copy.
    assert 0.9 * pairs < gained("randkv_copied_token_head_pairs_total") <= pairs
    absolute = gained("randkv_request_absolute_tokens_sum")
    assert absolute == summed("physical_tokens") + summed("evicted_tokens")
    assert gained("randkv_request_physical_tokens_sum") == summed("physical_tokens")
    assert gained("randkv_request_physical_tokens_count", policy="dense") == 3
    assert gained("randkv_requests_total", outcome="length", policy="randkv") == 9
    assert gained("randkv_requests_total", outcome="length", policy="dense") == 3
    steps = gained("randkv_compaction_seconds_count")
    assert 0 < steps <= summed("rounds")
    assert gained("randkv_compaction_seconds_sum") > 0


def test_gauges_show_what_runs_now_and_return_to_zero(server: Server) -> None:
    with ThreadPoolExecutor(2) as pool:
        randkv = pool.submit(server.chat, max_tokens=2000, ignore_eos=True)
        dense = pool.submit(server.chat, max_tokens=2000, ignore_eos=True, kv_cache_policy="dense")
        seen, saved = set(), 0.0
        while not (randkv.done() and dense.done()):
            metrics = server.metrics()
            seen |= {
                policy
                for policy in ("randkv", "dense")
                if metrics.total("randkv_running_requests", policy=policy) == 1
            }
            saved = max(saved, metrics.total("randkv_saved_kv_bytes"))
    assert seen == {"randkv", "dense"}
    block_bytes = server.get("/v1/kv_cache/policy").json
    bytes_per_token, bound = block_bytes["bytes_per_token"], block_bytes["bound"]["bytes"]
    dense_bytes = 2000 * bytes_per_token
    assert 0.5 * (dense_bytes - bound) < saved < 1.1 * dense_bytes
    end = server.metrics()
    assert end.total("randkv_running_requests") == 0
    assert end.total("randkv_saved_kv_bytes") == 0


def test_freed_blocks_are_counted(server: Server) -> None:
    size = server.get("/v1/kv_cache/policy").json["block_size"]
    before = server.metrics().total("randkv_freed_blocks_total")
    policy = {"type": "randkv", "budget": size, "buffer_size": size}
    server.chat(kv_cache_policy=policy, max_tokens=5 * size, ignore_eos=True)
    after = server.metrics().total("randkv_freed_blocks_total")
    # A round every `size` tokens, each of which frees one block.
    assert after - before >= 2


def test_build_info_says_what_runs(server: Server) -> None:
    found = server.metrics().total(
        "randkv_build_info",
        version="0.1.0",
        vllm_version="0.28.0",
        patch=patching.digest(),
        compactor="native",
    )
    assert found == 1


def test_readiness_and_the_default_bound_are_those_of_the_routes(server: Server) -> None:
    metrics = server.metrics()
    assert server.get("/ready").status == 200
    assert metrics.total("randkv_ready") == 1
    bound = server.get("/v1/kv_cache/policy").json["bound"]["tokens"]
    assert metrics.total("randkv_default_bound_tokens") == bound > 0


def test_a_front_end_shows_its_counters_at_zero() -> None:
    registry = CollectorRegistry()
    Metrics("m", registry).start_front_end()
    for policy in ("randkv", "dense", "none"):
        for outcome in OUTCOMES:
            labels = {"model_name": "m", "policy": policy, "outcome": outcome}
            assert registry.get_sample_value("randkv_requests_total", labels) == 0
    for family, reasons in (
        ("randkv_refused_overrides_total", POLICY_REFUSALS),
        ("randkv_refused_requests_total", REFUSALS),
    ):
        for reason in reasons:
            labels = {"model_name": "m", "reason": reason}
            assert registry.get_sample_value(family, labels) == 0


def test_of_several_processes_one_that_is_not_ready_decides(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for value in (0, 1):
        source = (
            f"from randkv.metrics import Metrics; Metrics('m').family('randkv_ready').set({value})"
        )
        subprocess.run([sys.executable, "-c", source], cwd=REPOSITORY, env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    assert registry.get_sample_value("randkv_ready", {"model_name": "m"}) == 0


def test_a_port_of_their_own_keeps_the_names_of_vllm_for_every_prometheus() -> None:
    from server.metrics_port import MetricsPort

    accepted_by_2_42 = (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    )
    gauge = Gauge("vllm:test_of_the_port", "For this test.")
    port = MetricsPort("127.0.0.1", free_port())
    port.open()
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port.port}/metrics", headers={"Accept": accepted_by_2_42}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "\nvllm:test_of_the_port 0.0\n" in answer.read().decode()
    finally:
        port.close()
        REGISTRY.unregister(gauge)


def test_record_adds_everything_that_an_engine_reports() -> None:
    registry = CollectorRegistry()
    metrics = Metrics("m", registry)
    stats = PolicyStats(
        rounds=1,
        replayed_rounds=2,
        freed_blocks=3,
        copied_blocks=4,
        uncached_blocks=5,
        dropped_plans=6,
        replayed_tokens=7,
        compaction=CompactionStats(8, 9, [0.5, 0.25]),
        finished=[FinishedRequest("dense", 10, 11)],
        running={"randkv": 12},
        saved_kv_bytes=13,
    )
    from dataclasses import asdict

    metrics.record("3", from_dict(asdict(stats)))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "3", **labels})

    assert value("randkv_compaction_rounds_total", replay="false") == 1
    assert value("randkv_compaction_rounds_total", replay="true") == 2
    assert value("randkv_freed_blocks_total") == 3
    assert value("randkv_copied_on_write_blocks_total") == 4
    assert value("randkv_uncached_blocks_total") == 5
    assert value("randkv_dropped_plans_total") == 6
    assert value("randkv_replayed_tokens_total") == 7
    assert value("randkv_evicted_token_head_pairs_total") == 8
    assert value("randkv_copied_token_head_pairs_total") == 9
    assert value("randkv_compaction_seconds_sum") == 0.75
    assert value("randkv_request_absolute_tokens_sum", policy="dense") == 10
    assert value("randkv_request_physical_tokens_sum", policy="dense") == 11
    assert value("randkv_running_requests", policy="randkv") == 12
    assert value("randkv_running_requests", policy="dense") == 0
    assert value("randkv_saved_kv_bytes") == 13


def test_what_is_exposed_parses_and_labels_are_the_declared_ones() -> None:
    registry = CollectorRegistry()
    Metrics("m", registry).start_engine("0")
    declared = {metric.name: {"model_name", *metric.labels} for metric in METRICS}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            name = family.name.removesuffix("_created")
            assert sample.labels.keys() - {"le"} == declared[name]


def test_label_values_of_the_source_are_the_documented_ones() -> None:
    source = "".join(path.read_text() for path in Path(REPOSITORY / "server").glob("*.py"))
    refusals = re.findall(r'Refusal\(\s*\d+,[^)]*?"([a-z_]+)"', source)
    assert set(refusals) <= set(REFUSALS) | {"malformed"}
    assert set(OUTCOMES) == {"stop", "length", "abort", "error", "refused"}
