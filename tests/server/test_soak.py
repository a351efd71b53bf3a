# SPDX-License-Identifier: Apache-2.0
"""2,000 requests under memory pressure: nothing is lost, nothing leaks, the counters add up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import Metrics, Server, chat, serve, wait_until

CONCURRENCY = 24
NUM_REQUESTS = 1000  # each of the two tests
LAYERS_TIMES_HEADS = 2 * 2
BUFFER_SIZES = (0, 8, 24)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crowded(small_model: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose KV cache holds 4,096 tokens: four dense requests of the longest kind."""
    small = [*("--max-model-len", "1024"), *("--kv-cache-memory-bytes", str(2**22))]
    with serve(
        tmp_path_factory.mktemp("crowded"),
        *small_model,
        *small,
        *("--kv-cache-policy", '{"type": "randkv", "budget": 96, "buffer_size": 16}'),
        *("--max-num-seqs", "32"),
    ) as server:
        yield server


def resident_bytes(server: Server) -> int:
    """Memory of their own, no files, that the server and everything below it hold."""
    total = 0
    for pid in (server.process.pid, *server.engine_pids()):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1]) * 1024
    return total


def request(dice: random.Random, number: int) -> dict[str, Any]:
    """Of any policy, length and prompt; a third share the beginning of their prompts."""
    shared = "the quick brown fox " * 12 if dice.random() < 0.33 else ""
    policy: Any = "dense"
    if dice.random() < 0.75:
        policy = {
            "type": "randkv",
            "budget": dice.choice((96, 128, 200)),
            "buffer_size": dice.choice(BUFFER_SIZES),
        }
    return chat(
        messages=[{"role": "user", "content": f"{shared}{number}"}],
        max_tokens=dice.randint(1, 260 if policy != "dense" else 500),
        ignore_eos=True,
        temperature=dice.choice((0, 1)),
        kv_cache_policy=policy,
    )


async def run(server: Server, ask: Any, first: int, count: int) -> list[Any]:
    numbers = iter(range(first, first + count))
    found: list[Any] = []
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:

        async def worker() -> None:
            for number in numbers:
                found.append(await ask(client, number))

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return found


def gained(server: Server, before: Metrics, name: str, **labels: str) -> float:
    return server.metrics().total(name, **labels) - before.total(name, **labels)


def test_counters_equal_the_answers_under_preemption(crowded: Server) -> None:
    dice = random.Random(1)
    before = crowded.metrics()

    async def ask(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
        answer = await client.post("/v1/chat/completions", json=request(dice, number))
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        assert body["choices"][0]["finish_reason"] == "length"
        return body

    answers = asyncio.run(run(crowded, ask, 0, NUM_REQUESTS))
    total: Counter[str] = Counter()
    for answer in answers:
        report, usage = answer["kv_cache"], answer["usage"]
        tokens = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert report["physical_tokens"] + report["evicted_tokens"] == tokens
        if report["policy"] == "randkv":
            most = report["budget"] + report["buffer_size"] + max(report["buffer_size"], 1)
            assert report["physical_tokens"] <= most
        total.update({k: v for k, v in report.items() if isinstance(v, int)})
        total["completion_tokens"] += usage["completion_tokens"]

    assert len(answers) == NUM_REQUESTS
    assert total["preemptions"] > 20
    assert total["rounds"] > 1000
    expected = {
        "vllm:num_preemptions_total": total["preemptions"],
        "vllm:generation_tokens_total": total["completion_tokens"],
        "randkv_replayed_tokens_total": total["replayed_tokens"],
        "randkv_request_physical_tokens_sum": total["physical_tokens"],
        "randkv_request_absolute_tokens_sum": total["physical_tokens"] + total["evicted_tokens"],
        "randkv_request_absolute_tokens_count": NUM_REQUESTS,
        "randkv_requests_total": NUM_REQUESTS,
    }
    found = {name: gained(crowded, before, name) for name in expected}
    assert found == expected
    rounds = "randkv_compaction_rounds_total"
    assert gained(crowded, before, rounds, replay="false") == total["rounds"]
    replayed = gained(crowded, before, rounds, replay="true")
    assert replayed > 0
    evicted = gained(crowded, before, "randkv_evicted_token_head_pairs_total")
    evicted /= LAYERS_TIMES_HEADS
    least, most = total["evicted_tokens"] + replayed, total["evicted_tokens"] + 24 * replayed
    assert least <= evicted <= most
    copied = gained(crowded, before, "randkv_copied_token_head_pairs_total")
    assert 0.95 * evicted < copied / LAYERS_TIMES_HEADS <= evicted
    assert crowded.metrics().total("vllm:kv_cache_usage_perc") == 0


def test_nothing_leaks_when_clients_leave_at_any_moment(crowded: Server) -> None:
    dice = random.Random(2)
    before = crowded.metrics()

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        body = request(dice, number)
        kind = dice.choices(("stays", "leaves", "leaves a stream", "bad"), (5, 2, 3, 1))[0]
        if kind == "bad":
            body["kv_cache_policy"] = {"type": "randkv", "budget": 3}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
        elif kind == "leaves":
            patience = httpx.Timeout(300, read=dice.random())
            try:
                await client.post("/v1/chat/completions", json=body, timeout=patience)
            except httpx.ReadTimeout:
                return kind
            return "stays"
        else:
            body["stream"] = True
            events = dice.randint(0, 60) if kind == "leaves a stream" else 10**6
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                seen = 0
                async for line in answer.aiter_lines():
                    assert not line.startswith('data: {"error"')
                    if line == "data: [DONE]":
                        return "stays"
                    seen += 1
                    if seen > events:
                        return kind
                assert kind != "stays"
        return kind

    kinds = Counter(asyncio.run(run(crowded, ask, 10_000, NUM_REQUESTS // 3)))
    wait_until(lambda: crowded.running() == 0, 5, "nothing runs")
    warm = resident_bytes(crowded)
    kinds += Counter(asyncio.run(run(crowded, ask, 20_000, NUM_REQUESTS - NUM_REQUESTS // 3)))
    wait_until(lambda: crowded.running() == 0, 5, "nothing runs")
    assert sum(kinds.values()) == NUM_REQUESTS
    assert min(kinds.values()) > 20
    wait_until(lambda: crowded.metrics().total("vllm:kv_cache_usage_perc") == 0, 5, "no block held")
    assert resident_bytes(crowded) < 1.05 * warm
    ended = gained(crowded, before, "randkv_requests_total")
    assert ended == NUM_REQUESTS
    aborted = gained(crowded, before, "randkv_requests_total", outcome="abort")
    left = kinds["leaves"] + kinds["leaves a stream"]
    # A request may end in the very moment that its client leaves.
    assert 0.9 * left <= aborted <= left
    assert gained(crowded, before, "randkv_requests_total", outcome="refused") == kinds["bad"]
    assert gained(crowded, before, "randkv_requests_total", outcome="error") == 0
    assert "Traceback" not in crowded.printed
    # The cache is whole: a request finds all of it free, and gets what it got before.
    texts = {
        crowded.chat(seed=5, max_tokens=900, ignore_eos=True).json["choices"][0]["message"][
            "content"
        ]
        for _ in range(2)
    }
    assert len(texts) == 1
