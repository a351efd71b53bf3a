# SPDX-License-Identifier: Apache-2.0
"""Several API server processes and data-parallel engines: metrics that add up."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.server.process import Metrics, Reply, Server, free_port, is_alive, serve, wait_until

KEY = "some-key"
BEARER = {"Authorization": f"Bearer {KEY}"}


def test_two_servers_and_two_engines_answer_and_count_as_one(
    small_model: list[str], tmp_path: Path
) -> None:
    metrics_port = free_port()
    with serve(
        tmp_path,
        *small_model,
        *("--kv-cache-policy", '{"type": "randkv", "budget": 64, "buffer_size": 16}'),
        *("--api-server-count", "2", "--data-parallel-size", "2", "--api-key", KEY),
        *("--metrics-port", str(metrics_port)),
    ) as server:
        pids = server.engine_pids()

        def scrape() -> Metrics:
            return Server(server.process, metrics_port, server.log).metrics()

        wait_until(lambda: _can_scrape(scrape), 30, "metrics on their own port")
        assert server.get("/v1/models").status == 401
        assert server.get("/metrics").status == 404

        def ask(number: int) -> Reply:
            return server.chat(BEARER, max_tokens=150 + number, ignore_eos=True, seed=number % 4)

        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(ask, range(24)))
        assert {reply.status for reply in replies} == {200}
        reports = [reply.json["kv_cache"] for reply in replies]
        # One key gives one keep-set, whichever process served it.
        by_key: dict[str, set[str]] = {}
        for number, reply in enumerate(replies):
            text = reply.json["choices"][0]["message"]["content"]
            by_key.setdefault(f"seed:{number % 4}", set()).add(text[:60])
        assert all(len(texts) == 1 for texts in by_key.values())
        metrics = scrape()
        rounds = sum(report["rounds"] for report in reports)
        assert metrics.total("randkv_compaction_rounds_total") == rounds > 0
        evicted = sum(report["evicted_tokens"] for report in reports)
        assert metrics.total("randkv_evicted_token_head_pairs_total") == 2 * 2 * evicted
        assert metrics.total("randkv_requests_total", outcome="length") == 24
        assert metrics.total("randkv_refused_requests_total", reason="authentication") == 1
        both = [
            metrics.total("randkv_request_absolute_tokens_count", engine=engine) for engine in "01"
        ]
        assert sum(both) == 24
        assert min(both) > 0
        assert metrics.total("randkv_running_requests") == 0
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=90)
        wait_until(lambda: not any(map(is_alive, pids)), 20, "no process is left")


def _can_scrape(scrape: object) -> bool:
    try:
        scrape()  # type: ignore[operator]
    except OSError:
        return False
    return True
