# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's V2 model runner. `test_v2_runner.py` runs them, in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.gpu.warmup import warmup_kernels

from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, Engine, Watcher, assert_all_exact, engine
from tests.engine.oracle import Oracle


class Addresses:
    """Of everything that a captured CUDA graph would read, at every step."""

    def __init__(self, running: Engine) -> None:
        self.seen: set[tuple[int, ...]] = set()
        self.steps = 0
        self._original = running.runner.model_state.prepare_attn
        running.runner.model_state.prepare_attn = self._prepare_attn

    def _prepare_attn(
        self, batch: Any, mode: Any, block_tables: Any, slot_mappings: Any, *args: Any, **more: Any
    ) -> Any:
        tensors = (
            batch.seq_lens,
            batch.query_start_loc,
            batch.input_ids,
            batch.positions,
            block_tables[0],
            slot_mappings,
        )
        self.seen.add(tuple(tensor.data_ptr() for tensor in tensors))
        self.steps += 1
        metadata = self._original(batch, mode, block_tables, slot_mappings, *args, **more)
        lengths = {layer.seq_lens.data_ptr() for layer in metadata.values()}
        assert lengths == {batch.seq_lens.data_ptr()}, "attention reads lengths from elsewhere"
        assert batch.seq_lens_cpu_upper_bound.tolist() == batch.seq_lens.tolist()
        return metadata


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_every_kind_of_request_at_once(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts, asynchronous: bool
) -> None:
    """More requests than rows, and than blocks: rows are used again, and caches are replayed."""
    with engine(
        tiny_model,
        asynchronous=asynchronous,
        kv_cache_policy=POLICY,
        max_num_seqs=7,
        max_num_batched_tokens=40,
        num_gpu_blocks_override=19,
        max_model_len=256,
    ) as running:
        assert running.is_v2
        worker = running.core.model_executor.driver_worker.worker
        warmup_kernels(running.runner, worker.execute_model, worker.sample_tokens)  # as on a GPU
        assert not running.runner.kv_cache_policy._blocks
        watching, addresses = Watcher(running), Addresses(running)
        shared = prompts(40)
        running.add("neighbour", shared, 150)
        running.add("shared", shared[:35], 80)
        running.add("no-buffer", prompts(7), 70, {"type": "randkv", "buffer_size": 0})
        running.add("full-prompt", prompts(48), 60)
        running.add("small", prompts(20), 60, {"type": "randkv", "budget": 20, "buffer_size": 3})
        running.add("large", prompts(20), 100, {"type": "randkv", "budget": 70, "seed": 5})
        running.add("dense", shared, 60, "dense")
        for i in range(3):
            running.add(f"late-{i}", prompts.any(1, 48), 70)
        for _ in range(45):
            running.step()
        assert running.request("small").kv_cache_state.rounds > 3
        running.preempt("small")
        running.runner._dummy_run(5, uniform_decode=True)  # what graphs are captured with
        for _ in range(15):
            running.step()
        running.llm.llm_engine.abort_request(["neighbour"])
        outputs = running.run()
        replayed = running.scheduler.kv_cache_policy.stats.replayed_rounds
        policy = running.runner.kv_cache_policy
        assert policy.num_rounds == len(watching.rounds)
        assert policy.pairs.evicted >= policy.pairs.copied > 0
        evicted = sum(plan.old_len - plan.new_len for plan in watching.rounds)
        assert policy.pairs.evicted == 2 * 2 * evicted  # layers, KV heads
    assert len(outputs) == 9
    assert_all_exact(tiny_oracle, outputs.values())
    for output in outputs.values():
        assert output.kv_cache["rounds"] > 2 or output.request_id == "dense"
    assert sum(output.kv_cache["preemptions"] for output in outputs.values()) > 1
    assert replayed > 3
    assert addresses.steps > 150
    assert len(addresses.seen) == 1


def test_a_request_preempted_twice_is_replayed_exactly(
    any_engine: Engine, watcher: Watcher, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """A resumed request arrives as a new one, in another row, with rounds behind it."""
    policy = {"type": "randkv", "budget": 40}  # each round frees a block
    any_engine.add("resumed", prompts(20), 110, policy)
    any_engine.add("neighbour", prompts(40), 110)
    for _ in range(60):
        any_engine.step()
    any_engine.preempt("resumed")
    for _ in range(30):
        any_engine.step()
    any_engine.preempt("resumed")
    outputs = any_engine.run()
    assert_all_exact(tiny_oracle, outputs.values())
    assert outputs["resumed"].kv_cache["preemptions"] == 2
    assert outputs["resumed"].kv_cache["replayed_tokens"] > 0
    assert [plan.round_index for plan in watcher.rounds].count(0) == 4


def test_what_the_worker_did_is_counted(any_engine: Engine, prompts: Prompts) -> None:
    """In steady state one pair is copied for each evicted one, and the scheduler is told."""
    policy = any_engine.runner.kv_cache_policy
    policy.take_stats()
    told = []
    add = any_engine.scheduler.kv_cache_policy.add_compaction
    any_engine.scheduler.kv_cache_policy.add_compaction = told.append
    any_engine.add("request", prompts(10), 100)
    output = any_engine.run()["request"]
    any_engine.scheduler.kv_cache_policy.add_compaction = add
    told = [stats for stats in told if stats is not None]
    assert sum(len(stats.seconds) for stats in told) == output.kv_cache["rounds"]
    evicted = sum(stats.evicted_pairs for stats in told)
    assert evicted == 2 * 2 * output.kv_cache["evicted_tokens"]
    assert 0 < sum(stats.copied_pairs for stats in told) <= evicted
