# SPDX-License-Identifier: Apache-2.0
"""What may happen to a request, and the state everything must be in afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState

from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, Engine, Watcher, assert_all_exact, assert_exact, engine
from tests.engine.models import SMOLLM2
from tests.engine.oracle import Oracle

FIRST_ROUND = 48 + 8 + 1
"""Computed tokens at which `any_engine`'s default policy runs its first round."""


def step_until(running: Engine, request_id: str, num_tokens: int) -> None:
    """Step until the request has `num_tokens` computed tokens, or one schedule more."""
    for _ in range(2000):
        running.step()
        if running.request(request_id).num_computed_tokens >= num_tokens:
            return
    raise AssertionError(f"{request_id} did not reach {num_tokens} computed tokens")


@pytest.mark.parametrize(
    "moment", [0, 5, FIRST_ROUND - 1, FIRST_ROUND, FIRST_ROUND + 1, FIRST_ROUND + 8]
)
def test_abort_before_during_and_after_a_round(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts, moment: int
) -> None:
    any_engine.add("aborted", prompts(4), 400)
    any_engine.add("neighbour", prompts(30), 100)
    if moment:
        step_until(any_engine, "aborted", moment)
    any_engine.llm.llm_engine.abort_request(["aborted", "never seen"])
    outputs = any_engine.run()
    assert set(outputs) == {"neighbour"}
    assert_exact(tiny_oracle, outputs["neighbour"])


def test_prefix_cache_is_shared_by_dense_and_policy_requests(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """A block boundary inside the prompt; hits in both directions; nothing compacted is hit."""
    shared = prompts(40)
    any_engine.add("policy", shared, 120)
    policy = any_engine.run()["policy"]
    everything = shared + list(policy.outputs[0].token_ids)
    any_engine.add("dense", everything[:100], 60, "dense")
    any_engine.add("again", shared, 120)
    any_engine.add("longer", everything[:46], 120)
    outputs = any_engine.run()
    assert_all_exact(tiny_oracle, outputs.values())
    assert outputs["again"].num_cached_tokens >= 32
    # Up to the first round the policy request's cache was dense, and may be hit.
    assert outputs["dense"].num_cached_tokens <= FIRST_ROUND
    assert outputs["longer"].num_cached_tokens <= 48


def test_prefix_hits_of_policy_requests_stop_at_the_compacted_length(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """A resumed request finds its own tokens in the cache, but as a dense request computed them."""
    any_engine.add("resumed", prompts(20), 150)
    step_until(any_engine, "resumed", 120)
    tokens = list(any_engine.request("resumed").all_token_ids)
    any_engine.add("dense", tokens[:110], 10, "dense")
    for _ in range(6):
        any_engine.step()
    any_engine.preempt("resumed")
    outputs = any_engine.run()
    assert_all_exact(tiny_oracle, outputs.values())
    replayed = outputs["resumed"].kv_cache["replayed_tokens"]
    assert replayed >= 120 - (48 + 8)
    assert replayed < 120 - 16, "nothing was found in the prefix cache: nothing is tested"


def share_generated_blocks(running: Engine, prompts: Prompts, writer_prompt: int) -> None:
    """Bring a policy request to its first round while a dense one holds blocks it generated."""
    running.add("writer", prompts(writer_prompt), 150)
    step_until(running, "writer", FIRST_ROUND - 3)
    running.add("reader", list(running.request("writer").all_token_ids)[:50], 80, "dense")
    running.step()
    blocks = running.blocks_of("writer")
    shared = [index for index, block in enumerate(blocks) if block.ref_cnt > 1]
    assert shared == [0, 1, 2], "the reader does not share the blocks that the test is about"


def test_copy_on_write_when_a_generated_block_is_shared(
    any_engine: Engine, watcher: Watcher, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    stats = any_engine.scheduler.kv_cache_policy.stats
    copied = stats.copied_blocks
    share_generated_blocks(any_engine, prompts, 18)
    outputs = any_engine.run()
    assert [len(p.block_copies) for p in watcher.rounds if p.block_copies] == [2]
    assert stats.copied_blocks == copied + 2
    assert_all_exact(tiny_oracle, outputs.values())


def test_copy_on_write_into_a_block_that_another_round_has_just_freed(
    any_engine: Engine, watcher: Watcher, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """The pool hands freed blocks out first, and the earlier round still reads them."""
    policy = {"type": "randkv", "budget": 40, "buffer_size": 16}
    any_engine.add("ahead", prompts(12 + 16), 150, policy)
    share_generated_blocks(any_engine, prompts, 12)
    before = [block.block_id for block in any_engine.blocks_of("ahead")]
    outputs = any_engine.run()
    copied = next(
        step for step in watcher.steps if any(p.block_copies for p in step.kv_cache_rounds or ())
    )
    plans = copied.kv_cache_rounds
    assert [bool(plan.block_copies) for plan in plans] == [False, True]
    assert {c.target for c in plans[1].block_copies} & set(before), "no freed block was reused"
    assert_all_exact(tiny_oracle, outputs.values())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_no_free_block_for_copy_on_write_preempts(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts, asynchronous: bool
) -> None:
    with engine(
        tiny_model,
        asynchronous=asynchronous,
        kv_cache_policy=POLICY,
        num_gpu_blocks_override=10,
        max_model_len=140,
    ) as running:
        watching = Watcher(running)
        running.add("filler", prompts(30), 100)
        share_generated_blocks(running, prompts, 12)
        outputs = running.run()
        assert not any(plan.block_copies for plan in watching.rounds)
    assert outputs["reader"].kv_cache["preemptions"] > 0
    assert_all_exact(tiny_oracle, outputs.values())


def test_n_samples_have_their_own_keys(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    any_engine.add("request", prompts(10), 100, n=3, temperature=1.0, top_k=1)
    output = any_engine.run()["request"]
    assert [c.kv_cache["request_key"] for c in output.outputs] == [
        "request/0",
        "request/1",
        "request/2",
    ]
    assert output.kv_cache["request_key"] == "request"
    assert output.kv_cache["rounds"] == sum(c.kv_cache["rounds"] for c in output.outputs)
    texts = {tuple(c.token_ids) for c in output.outputs}
    assert len(texts) == 3  # top_k = 1 is greedy: only the keep-sets differ
    for completion in output.outputs:
        output.outputs = [completion]
        assert_exact(tiny_oracle, output)


@pytest.mark.parametrize("times", [1, 3])
def test_reset_prefix_cache_with_running_requests(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts, times: int
) -> None:
    for i in range(3):
        any_engine.add(f"r{i}", prompts.any(5, 40), 150)
    for _ in range(times):
        for _ in range(40):
            any_engine.step()
        assert any_engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    outputs = any_engine.run()
    for output in outputs.values():
        assert_exact(tiny_oracle, output)
        assert output.kv_cache["preemptions"] == times
        assert output.kv_cache["replayed_tokens"] > 0


def test_pause_and_resume(any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts) -> None:
    any_engine.add("request", prompts(10), 120)
    step_until(any_engine, "request", FIRST_ROUND - 1)
    for state in (PauseState.PAUSED_ALL, PauseState.PAUSED_NEW):
        any_engine.scheduler.set_pause_state(state)
        for _ in range(5):
            any_engine.step()
        any_engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert_exact(tiny_oracle, any_engine.run()["request"])


def test_a_request_id_can_be_used_again(
    any_engine: Engine, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """Runs leave no state behind: the same id and prompt give the same answer, many times."""
    prompt = prompts(15)
    seen = set()
    for _ in range(3):
        any_engine.add("same", prompt, 100)
        output = any_engine.run()["same"]
        assert_exact(tiny_oracle, output)
        seen.add(tuple(output.outputs[0].token_ids))
    assert len(seen) == 1


def test_seed_and_request_key_name_the_keep_sets(any_engine: Engine, prompts: Prompts) -> None:
    prompt = prompts(15)
    any_engine.add("a", prompt, 100, seed=11)
    any_engine.add("b", prompt, 100, {"type": "randkv", "request_key": "seed:11"})
    any_engine.add("c", prompt, 100, {"type": "randkv", "request_key": "seed:11", "seed": 1})
    outputs = any_engine.run()
    tokens = {key: list(out.outputs[0].token_ids) for key, out in outputs.items()}
    assert tokens["a"] == tokens["b"] != tokens["c"]


def test_budget_above_the_output_is_dense_bit_for_bit(any_engine: Engine, prompts: Prompts) -> None:
    prompt = prompts(30)
    any_engine.add("dense", prompt, 100, "dense")
    dense = any_engine.run()["dense"]
    any_engine.add("large", prompt, 100, {"type": "randkv", "budget": 1000})
    large = any_engine.run()["large"]
    assert large.kv_cache["rounds"] == 0
    assert large.kv_cache["physical_tokens"] == dense.kv_cache["physical_tokens"] == 129
    assert list(large.outputs[0].token_ids) == list(dense.outputs[0].token_ids)
    for mine, theirs in zip(large.outputs[0].logprobs, dense.outputs[0].logprobs, strict=True):
        assert {t: v.logprob for t, v in mine.items()} == {t: v.logprob for t, v in theirs.items()}


def test_penalties_logprobs_and_sampling_are_unaffected(
    any_engine: Engine, prompts: Prompts
) -> None:
    """With a budget above the output, every sampling feature gives what it gives dense."""
    settings: dict[str, dict[str, Any]] = {
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 4},
        "logprobs": {"logprobs": 5, "prompt_logprobs": 2},
        "bias": {"logit_bias": {7: 5.0}, "min_tokens": 60},
        "stop": {"stop_token_ids": list(range(100, 160))},
    }
    prompt = prompts(30)
    for name, params in settings.items():
        # One at a time: sampling with a seed must not depend on the batch.
        any_engine.add("dense", prompt, 80, "dense", **params)
        dense = any_engine.run()["dense"]
        any_engine.add("policy", prompt, 80, {"type": "randkv", "budget": 500}, **params)
        policy = any_engine.run()["policy"]
        assert list(policy.outputs[0].token_ids) == list(dense.outputs[0].token_ids), name
        assert policy.outputs[0].stop_reason == dense.outputs[0].stop_reason, name
        assert len(policy.outputs[0].logprobs) == len(dense.outputs[0].logprobs), name


def test_penalties_see_evicted_tokens(any_engine: Engine, prompts: Prompts) -> None:
    """Penalties count all output tokens, whether the cache still holds them or not."""
    any_engine.add("request", prompts(10), 300, repetition_penalty=10.0)
    output = any_engine.run()["request"]
    tokens = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
    assert output.kv_cache["evicted_tokens"] > 200
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_priority_scheduling_preempts_and_stays_exact(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts, asynchronous: bool
) -> None:
    with engine(
        tiny_model,
        asynchronous=asynchronous,
        kv_cache_policy=POLICY,
        scheduling_policy="priority",
        num_gpu_blocks_override=25,
        max_model_len=256,
    ) as running:
        for i in range(4):
            running.add(f"low-{i}", prompts.any(5, 40), 150, priority=10)
        for _ in range(70):
            running.step()
        for i in range(3):
            running.add(f"high-{i}", prompts.any(5, 40), 150, priority=0)
        outputs = running.run()
    assert len(outputs) == 7
    assert sum(out.kv_cache["preemptions"] for out in outputs.values()) > 0
    assert_all_exact(tiny_oracle, outputs.values())


def test_one_request_preempted_several_times(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    with engine(
        tiny_model,
        kv_cache_policy=POLICY,
        scheduling_policy="priority",
        num_gpu_blocks_override=16,
        max_model_len=240,
    ) as running:
        running.add("victim", prompts(20), 220, priority=10)
        outputs = {}
        for i in range(4):
            for _ in range(45):
                outputs.update((out.request_id, out) for out in running.step())
            for j in range(3):
                running.add(f"high-{i}-{j}", prompts.any(20, 40), 45, priority=0)
        outputs.update(running.run())
    assert outputs["victim"].kv_cache["preemptions"] >= 3
    assert_all_exact(tiny_oracle, outputs.values())


def test_structured_output_and_stop_strings_with_a_policy() -> None:
    """On the default model, since both need its tokenizer."""
    with engine(
        SMOLLM2, kv_cache_policy={"type": "randkv", "budget": 64, "buffer_size": 8}
    ) as running:
        tokenizer = running.llm.get_tokenizer()
        prompt = tokenizer("Count to twenty: 1, 2, 3,").input_ids
        grammar = StructuredOutputsParams(regex="( [0-9]+,){40}")
        running.add(
            "grammar", prompt, 150, detokenize=True, ignore_eos=False, structured_outputs=grammar
        )
        running.add("stop", prompt, 150, detokenize=True, stop=["zzz", "\n\n\n\n", ", 9"])
        outputs = running.run()
        text = outputs["grammar"].outputs[0].text
        assert text.count(",") == 40 or outputs["grammar"].outputs[0].finish_reason == "length"
        assert set(text) <= set("0123456789, ")
        assert outputs["grammar"].kv_cache["rounds"] > 2
        # A stop string is found outside the engine core, which must have reported all the same.
        report = outputs["stop"].kv_cache
        assert report is not None
        if outputs["stop"].outputs[0].finish_reason == "stop":
            assert outputs["stop"].outputs[0].stop_reason == ", 9"
        # Streams carry the report on their last output only.
        running.llm.llm_engine.add_request(
            "stream",
            TokensPrompt(prompt_token_ids=prompt),
            SamplingParams(
                temperature=0,
                max_tokens=100,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        seen = []
        while running.llm.llm_engine.has_unfinished_requests():
            seen += running.llm.llm_engine.step()
        assert [out.kv_cache is not None for out in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].kv_cache["rounds"] > 2
        running.check_pool()
