# SPDX-License-Identifier: Apache-2.0
"""The counts that the metrics are made of, against what is seen in the engine itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from randkv.metrics import from_dict
from randkv.stats import PolicyStats
from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, Engine, Watcher, engine

HEADS = 2 * 2


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def counted(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Engine]:
    with engine(
        tiny_model, asynchronous=request.param, kv_cache_policy=POLICY, disable_log_stats=False
    ) as started:
        yield started


class Told:
    """Sums what the scheduler tells the stat loggers, and keeps the gauges that it saw."""

    def __init__(self, running: Engine) -> None:
        self.sum = PolicyStats()
        self.running: list[dict[str, int]] = []
        self.saved: list[int] = []
        self._scheduler = running.scheduler
        self._original = running.scheduler.make_stats
        running.scheduler.make_stats = self._take

    def _take(self, *args: object, **kwargs: object) -> object:
        stats = self._original(*args, **kwargs)
        told = from_dict(stats.kv_cache_policy)
        for name in (
            *("rounds", "replayed_rounds", "freed_blocks", "copied_blocks", "uncached_blocks"),
            *("dropped_plans", "replayed_tokens", "finished"),
        ):
            setattr(self.sum, name, getattr(self.sum, name) + getattr(told, name))
        self.sum.compaction.evicted_pairs += told.compaction.evicted_pairs
        self.sum.compaction.copied_pairs += told.compaction.copied_pairs
        self.sum.compaction.seconds += told.compaction.seconds
        self.running.append(told.running)
        self.saved.append(told.saved_kv_bytes)
        return stats

    def stop(self) -> None:
        self._scheduler.make_stats = self._original


@pytest.fixture
def told(counted: Engine) -> Iterator[Told]:
    telling = Told(counted)
    yield telling
    telling.stop()


def test_rounds_pairs_blocks_and_tokens(counted: Engine, told: Told, prompts: Prompts) -> None:
    worker = counted.runner.kv_cache_policy
    evicted, copied, seconds = *worker.pairs, worker.seconds
    watcher = Watcher(counted)
    counted.add("policy", prompts(10), 200, {"type": "randkv", "budget": 48, "buffer_size": 24})
    counted.add("dense", prompts(10), 100, "dense")
    outputs = counted.run()
    watcher.stop()
    report = outputs["policy"].kv_cache
    total = told.sum
    assert (total.rounds, total.replayed_rounds) == (report["rounds"], 0)
    assert total.rounds > 2
    assert total.compaction.evicted_pairs == HEADS * report["evicted_tokens"]
    assert total.compaction.evicted_pairs == worker.pairs.evicted - evicted
    assert total.compaction.copied_pairs == worker.pairs.copied - copied
    assert sum(total.compaction.seconds) == pytest.approx(worker.seconds - seconds)
    assert len(total.compaction.seconds) == report["rounds"]
    blocks = [-(-plan.old_len // 16) - plan.num_blocks for plan in watcher.rounds]
    assert total.freed_blocks == sum(blocks) > 0
    physical = {"randkv": report["physical_tokens"], "dense": 109}
    assert {f.policy: f.physical_tokens for f in total.finished} == physical
    assert {f.policy: f.absolute_tokens for f in total.finished} == {"randkv": 209, "dense": 109}
    assert {"randkv": 1, "dense": 1} in told.running
    assert told.running[-1] == {}


def test_saved_bytes_are_those_of_the_blocks_not_held(
    counted: Engine, told: Told, prompts: Prompts
) -> None:
    counted.add("r", prompts(10), 150)
    manager = counted.scheduler.kv_cache_manager
    block_size = manager.coordinator.single_type_managers[0].block_size
    config = manager.kv_cache_config
    block_bytes = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    while counted.scheduler.has_unfinished_requests():
        counted.step()
        if counted.scheduler.running:
            computed = counted.request("r").num_computed_tokens
            held = len(counted.blocks_of("r"))
            expected = max(-(-computed // block_size) - held, 0) * block_bytes
            assert told.saved[-1] == expected
    assert max(told.saved) > 0
    counted.run()
    assert told.saved[-1] == 0


def test_replays_and_dropped_plans(counted: Engine, told: Told, prompts: Prompts) -> None:
    watcher = Watcher(counted)
    counted.add("r", prompts(10), 150)
    while counted.request("r").num_computed_tokens < 100:
        counted.step()
    counted.preempt("r")
    report = counted.run()["r"].kv_cache
    watcher.stop()
    assert report["preemptions"] == 1
    assert told.sum.replayed_tokens == report["replayed_tokens"] > 0
    assert told.sum.rounds == report["rounds"]
    sent = len(watcher.rounds)
    assert told.sum.rounds + told.sum.replayed_rounds == sent
    assert told.sum.replayed_rounds > 0


def test_blocks_taken_out_of_the_prefix_cache(
    counted: Engine, told: Told, prompts: Prompts
) -> None:
    counted.add("r", prompts(40), 100)
    hashed: set[int] = set()
    uncached = 0
    while counted.scheduler.has_unfinished_requests():
        before = {b.block_id for b in counted.pool.blocks if b.block_hash is not None}
        counted.step()
        after = {b.block_id for b in counted.pool.blocks if b.block_hash is not None}
        uncached += len(before - after)
        hashed |= after
    counted.run()
    assert told.sum.uncached_blocks == uncached > 0


def test_an_aborted_request_leaves_its_tokens(
    counted: Engine, told: Told, prompts: Prompts
) -> None:
    counted.add("r", prompts(10), 300)
    while counted.request("r").num_computed_tokens < 100:
        counted.step()
    request = counted.request("r")
    evicted = request.kv_cache_state.evicted_tokens
    computed = min(request.num_computed_tokens, request.num_tokens - 1)
    counted.llm.llm_engine.abort_request(["r"])
    counted.run()
    (finished,) = told.sum.finished
    assert finished.absolute_tokens == computed
    assert finished.physical_tokens == computed - evicted


def test_nothing_piles_up_in_an_engine_that_does_not_log(
    any_engine: Engine, prompts: Prompts
) -> None:
    stats = any_engine.scheduler.kv_cache_policy.stats
    any_engine.add("r", prompts(10), 150)
    any_engine.run()
    assert stats.rounds > 0
    assert stats.finished == stats.compaction.seconds == []
