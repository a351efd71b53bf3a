# SPDX-License-Identifier: Apache-2.0
"""Memory is really released, and everyone who asks for memory knows the bound K + 2r."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compaction import measure
from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, Engine, assert_all_exact, assert_exact, engine
from tests.engine.models import SMOLLM2
from tests.engine.oracle import Oracle

LONG = {"type": "randkv", "budget": 256, "buffer_size": 32}
NUM_TOKENS = 4000
BOUND = 256 + 2 * 32 + 1


def blocks(num_tokens: int, block_size: int = 16) -> int:
    return -(-num_tokens // block_size)


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_long_decode_never_holds_more_than_the_bound(
    tiny_model: Path, prompts: Prompts, block_size: int
) -> None:
    with engine(
        tiny_model, kv_cache_policy=LONG, block_size=block_size, max_model_len=4096
    ) as running:
        running.add("r", prompts(100), NUM_TOKENS)
        most = 0
        while running.llm.llm_engine.has_unfinished_requests():
            running.step()
            used = running.num_blocks - running.pool.get_num_free_blocks()
            if running.scheduler.requests:
                assert used == len(running.blocks_of("r"))
            else:
                assert used == 0
            most = max(most, used)
        running.check_pool()
    assert blocks(256 + 32, block_size) <= most <= blocks(BOUND, block_size)


@pytest.mark.slow
def test_memory_for_4_dense_requests_runs_16_policy_requests_at_once(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    with engine(
        tiny_model,
        kv_cache_policy=LONG,
        num_gpu_blocks_override=1 + 4 * blocks(NUM_TOKENS + 50),
        max_model_len=4096,
    ) as running:
        for i in range(16):
            running.add(f"r{i}", prompts(50), NUM_TOKENS)
        outputs = running.run()
        assert running.most_running == 16
        assert all(out.kv_cache["preemptions"] == 0 for out in outputs.values())
        assert_exact(tiny_oracle, outputs["r7"])


@pytest.mark.slow
def test_compaction_takes_under_5_percent_of_the_wall_time() -> None:
    """The same 16 requests on the default model, over a few rounds of each."""
    with engine(
        SMOLLM2,
        kv_cache_policy=LONG,
        num_gpu_blocks_override=1 + 4 * blocks(NUM_TOKENS + 50),
        max_model_len=4096,
    ) as running:
        share = measure(running, rounds=5)
    assert share.ratio < 0.05, share


def test_blocks_freed_by_a_round_serve_others_in_the_same_step(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """Each request swings between 4 and 5 blocks; the pool has 9, and nobody is preempted."""
    policy = {"type": "randkv", "budget": 40, "buffer_size": 16}
    limits = {"allow_dense": False, "budget": [1, 40], "buffer_size": [0, 16]}
    preemptions = {}
    for num_blocks in (9, 8):
        with engine(
            tiny_model,
            kv_cache_policy=policy,
            kv_cache_policy_limits=limits,
            num_gpu_blocks_override=1 + num_blocks,
            max_model_len=512,
        ) as running:
            running.add("ahead", prompts(28), 300)
            running.add("behind", prompts(20), 300)
            outputs = running.run()
        preemptions[num_blocks] = sum(out.kv_cache["preemptions"] for out in outputs.values())
        assert_all_exact(tiny_oracle, outputs.values())
    assert preemptions[9] == 0
    assert preemptions[8] > 0


def test_the_start_up_check_knows_the_bound(tiny_model: Path, prompts: Prompts) -> None:
    """16,384 tokens do not fit into 31 blocks of 16; a policy request of that length does."""
    limits = {"allow_dense": False, "budget": [1, 256], "buffer_size": [0, 32]}
    options = {"kv_cache_policy": LONG, "num_gpu_blocks_override": 32, "max_model_len": 16384}
    with pytest.raises(ValueError, match="max seq len"):
        Engine(tiny_model, **options)
    with engine(tiny_model, kv_cache_policy_limits=limits, **options) as running:
        running.add("r", prompts(100), 1000)
        assert running.run()["r"].kv_cache["preemptions"] == 0


def test_a_pool_that_passes_the_check_is_never_too_small(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """The smallest pool that starts runs the largest request; one block less does not start."""
    options = {
        "kv_cache_policy": POLICY,
        "kv_cache_policy_limits": {"allow_dense": False},
        "max_model_len": 2048,
    }
    smallest = blocks(48 + 2 * 8) + 1  # and vLLM's null block
    with pytest.raises(ValueError, match="max seq len"):
        Engine(tiny_model, num_gpu_blocks_override=smallest - 1, **options)
    with engine(tiny_model, num_gpu_blocks_override=smallest, **options) as running:
        running.add("r", prompts(20), 150)
        assert_exact(tiny_oracle, running.run()["r"])  # one that hangs fails in `run`


def test_admission_knows_the_bound(tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts) -> None:
    """A preempted request of 1,000 tokens is let in again although only the bound is free."""
    limits = {"allow_dense": False, "budget": [1, 48], "buffer_size": [0, 8]}
    with engine(
        tiny_model,
        kv_cache_policy=POLICY,
        kv_cache_policy_limits=limits,
        num_gpu_blocks_override=9,
        max_model_len=2048,
    ) as running:
        running.add("r", prompts(40), 1000)
        for _ in range(700):
            running.step()
        running.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        output = running.run()["r"]
    assert output.kv_cache["preemptions"] == 1
    assert output.kv_cache["replayed_tokens"] >= 700
    assert_exact(tiny_oracle, output)
