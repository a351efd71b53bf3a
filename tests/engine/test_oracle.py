# SPDX-License-Identifier: Apache-2.0
"""The test that matters: the engine against a full cache with a mask per (layer, KV head)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from randkv.config import RequestPolicy
from tests.engine.conftest import Prompts
from tests.engine.harness import (
    POLICY,
    Engine,
    assert_all_exact,
    assert_exact,
    compare,
    engine,
    policy_of,
)
from tests.engine.models import SMOLLM2
from tests.engine.oracle import Oracle

TEXTS = [
    "The capital of France is",
    "Once upon a time there was a girl who",
    "Explain in detail how photosynthesis works, step by step.",
    "def fibonacci(n):\n    ",
]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 16, "enable_prefix_caching": True},
        {"block_size": 32, "enable_prefix_caching": False},
        {"block_size": 32, "max_num_batched_tokens": 24, "max_num_seqs": 16},
    ],
    ids=["prefix-caching", "no-prefix-caching", "chunked-prefill"],
)
def test_every_kind_of_request_at_once(
    tiny_model: Path,
    tiny_oracle: Oracle,
    prompts: Prompts,
    asynchronous: bool,
    options: dict[str, Any],
) -> None:
    """Shared prompts, r = 0, P = K, dense neighbours, different budgets; an aborted neighbour."""
    with engine(
        tiny_model, asynchronous=asynchronous, kv_cache_policy=POLICY, **options
    ) as running:
        shared = prompts(40)
        running.add("first", shared, 100)
        for _ in range(30):
            running.step()
        for i in range(4):
            running.add(f"shared-{i}", shared[: 30 + 3 * i], 150)
        for i in range(4):
            running.add(f"mixed-{i}", prompts.any(1, 48), 150)
        running.add("no-buffer", prompts(7), 90, {"type": "randkv", "buffer_size": 0})
        running.add("full-prompt", prompts(48), 120)
        running.add(
            "full-prompt-no-buffer",
            prompts(9),
            60,
            {"type": "randkv", "budget": 9, "buffer_size": 0},
        )
        running.add("small", prompts(20), 120, {"type": "randkv", "budget": 20, "buffer_size": 3})
        running.add("large", prompts(20), 150, {"type": "randkv", "budget": 100, "seed": 5})
        running.add("dense", shared, 120, "dense")
        running.add("neighbour", shared, 500)
        for _ in range(60):
            running.step()
        running.llm.llm_engine.abort_request(["neighbour"])
        outputs = running.run()
    assert "neighbour" not in outputs
    for output in outputs.values():
        assert_exact(tiny_oracle, output)
        assert output.kv_cache["rounds"] > 2 or output.request_id == "dense"


def test_a_wrong_keep_set_would_be_seen(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """The oracle is worth something only if it rejects other keys, other budgets, and dense."""
    any_engine.add("request", prompts(20), 150)
    output = any_engine.run()["request"]
    assert_exact(tiny_oracle, output)
    truth = policy_of(output)
    assert truth.config is not None
    prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    for wrong in (RequestPolicy(truth.config, "another"), RequestPolicy(None, "")):
        result = tiny_oracle.compare(wrong, prompt, tokens, [0.0] * len(tokens))
        assert result.num_different > 20


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_hundred_requests_preempted_in_mid_generation(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts, asynchronous: bool
) -> None:
    with engine(
        tiny_model,
        asynchronous=asynchronous,
        kv_cache_policy=POLICY,
        num_gpu_blocks_override=161,
        max_model_len=1024,
        max_num_batched_tokens=256,
    ) as running:
        for i in range(110):
            running.add(f"r{i}", prompts.any(1, 48), 200)
        outputs = running.run()
    assert len(outputs) == 110
    assert sum(out.kv_cache["preemptions"] for out in outputs.values()) > 0
    assert sum(out.kv_cache["replayed_tokens"] for out in outputs.values()) > 0
    assert_all_exact(tiny_oracle, outputs.values())


@pytest.mark.slow
def test_a_hundred_requests_running_at_once_asynchronously(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """Stale evicted counts under asynchronous scheduling showed near 100 concurrent requests."""
    with engine(
        tiny_model,
        asynchronous=True,
        kv_cache_policy=POLICY,
        num_gpu_blocks_override=421,
        max_num_batched_tokens=512,
    ) as running:
        for i in range(128):
            running.add(f"r{i}", prompts.any(1, 48), 220)
        outputs = running.run()
        assert running.most_running >= 100
    assert sum(out.kv_cache["preemptions"] for out in outputs.values()) > 0
    results = [compare(tiny_oracle, output) for output in outputs.values()]
    assert sum(result.num_different for result in results) == 0
    assert max(result.max_logprob_error for result in results) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"asynchronous": False, "block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"asynchronous": True, "block_size": 16, "num_gpu_blocks_override": 45},
        {"asynchronous": False, "block_size": 32, "num_gpu_blocks_override": 22},
        {"asynchronous": True, "block_size": 32, "enable_prefix_caching": False},
    ],
    ids=[
        "synchronous-16-chunked-prefill",
        "asynchronous-16-preempted",
        "synchronous-32-preempted",
        "asynchronous-32-no-prefix-caching",
    ],
)
def test_smollm2_is_exact(smollm2_oracle: Oracle, options: dict[str, Any]) -> None:
    """Real text, 400 tokens and 8 rounds each at least; r = 0, P = K, and an aborted neighbour."""
    with engine(
        SMOLLM2,
        kv_cache_policy={"type": "randkv", "budget": 96, "buffer_size": 32},
        max_model_len=640,
        **options,
    ) as running:
        tokenizer = running.llm.get_tokenizer()
        texts = [tokenizer(text).input_ids for text in TEXTS]
        running.add("neighbour", texts[2], 600)
        for i, text in enumerate(texts):
            running.add(f"text-{i}", text, 400)
        full = (texts[2] * 10)[:64]
        running.add("full-prompt", full, 400, {"type": "randkv", "budget": 64, "buffer_size": 16})
        running.add("no-buffer", texts[1], 400, {"type": "randkv", "buffer_size": 0})
        for _ in range(250):
            running.step()
        running.llm.llm_engine.abort_request(["neighbour"])
        outputs = running.run()
    assert len(outputs) == 6
    for output in outputs.values():
        assert output.kv_cache["rounds"] >= 8
        assert_exact(smollm2_oracle, output)
    preemptions = sum(out.kv_cache["preemptions"] for out in outputs.values())
    assert (preemptions > 0) is ("num_gpu_blocks_override" in options)
