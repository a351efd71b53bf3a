# SPDX-License-Identifier: Apache-2.0
"""Overrides on the way in, reports on the way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import BeamSearchParams
from vllm.v1.engine import FinishReason

from randkv import RandKVConfig, RandKVConfigError
from randkv.planner import replay
from tests.engine.conftest import Prompts
from tests.engine.harness import POLICY, Engine, assert_all_exact, assert_exact, engine, policy_of
from tests.engine.oracle import Oracle

LIMITS = {"allow_dense": False, "budget": [16, 256], "buffer_size": [0, 32]}


@pytest.fixture(scope="module")
def bounded(tiny_model: Path) -> Iterator[Engine]:
    policy = '{"type": "randkv", "budget": 48, "buffer_size": 8}'
    with engine(tiny_model, kv_cache_policy=policy, kv_cache_policy_limits=LIMITS) as running:
        yield running


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ({"type": "randkv", "budge": 50}, "kv_cache_policy.budge"),
        ({"type": "randkv", "budget": 300}, "kv_cache_policy.budget"),
        ({"type": "randkv", "buffer_size": 33}, "kv_cache_policy.buffer_size"),
        ({"type": "randkv", "seed": -1}, "kv_cache_policy.seed"),
        ({"type": "randkv", "request_key": 1}, "kv_cache_policy.request_key"),
        ({"type": "randkv", "budget": 20}, "kv_cache_policy.budget"),
        ("dense", "kv_cache_policy.type"),
        ("randkvv", "kv_cache_policy"),
        (17, "kv_cache_policy"),
        ("{" * 10000, "kv_cache_policy"),
    ],
)
def test_a_bad_override_fails_that_request_alone(
    bounded: Engine, tiny_oracle: Oracle, prompts: Prompts, override: Any, field: str
) -> None:
    bounded.add("before", prompts(30), 80)
    bounded.step()
    with pytest.raises(RandKVConfigError) as caught:
        bounded.add("bad", prompts(30), 80, override)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError | VLLMClientError)
    assert caught.value.parameter == field  # what vLLM's servers put into the answer's `param`
    assert len(str(caught.value)) < 600
    bounded.add("after", prompts(30), 80)
    outputs = bounded.run()
    assert set(outputs) == {"before", "after"}
    assert_all_exact(tiny_oracle, outputs.values())


def test_the_callers_parameters_are_not_changed(bounded: Engine, prompts: Prompts) -> None:
    extra_args = {"kv_cache_policy": {"type": "randkv", "budget": 64}, "other": 1}
    params = SamplingParams(max_tokens=5, extra_args=extra_args, detokenize=False)
    bounded.llm.llm_engine.add_request("r", TokensPrompt(prompt_token_ids=prompts(5)), params)
    bounded.run()
    assert params.extra_args == {"kv_cache_policy": {"type": "randkv", "budget": 64}, "other": 1}


def test_the_report_is_what_the_engine_did(bounded: Engine, prompts: Prompts) -> None:
    """Equal to the replay from the key alone, and to what the worker's counters grew by."""
    worker = bounded.runner.kv_cache_policy
    evicted, copied, rounds = *worker.pairs, worker.num_rounds
    override = {"type": "randkv", "budget": 40, "buffer_size": 16, "seed": 3, "request_key": "k"}
    bounded.add("r", prompts(12), 200, override)
    report = bounded.run()["r"].kv_cache
    computed = 12 + 200 - 1  # the last sampled token is never computed
    expected = replay(
        RandKVConfig(40, 16, 3),
        request_key="k",
        prompt_len=12,
        num_tokens=computed - 1,
        num_layers=2,
        num_kv_heads=2,
    )
    assert report == {
        "policy": "randkv",
        "budget": 40,
        "buffer_size": 16,
        "seed": 3,
        "request_key": "k",
        "rounds": len(expected),
        "evicted_tokens": sum(r.evicted_positions.shape[2] for r in expected),
        "physical_tokens": computed - sum(r.evicted_positions.shape[2] for r in expected),
        "replayed_tokens": 0,
        "preemptions": 0,
        "long_prompt": False,
    }
    assert worker.num_rounds - rounds == len(expected)
    assert worker.pairs.evicted - evicted == 4 * report["evicted_tokens"]
    assert worker.pairs.copied - copied == 4 * report["evicted_tokens"]


def test_dense_requests_report_too(any_engine: Engine, prompts: Prompts) -> None:
    any_engine.add("r", prompts(12), 100, "dense")
    report = any_engine.run()["r"].kv_cache
    assert report["policy"] == "dense"
    assert report["budget"] is report["buffer_size"] is report["seed"] is None
    assert (report["rounds"], report["evicted_tokens"], report["physical_tokens"]) == (0, 0, 111)


def test_dense_requests_count_replayed_tokens_too(any_engine: Engine, prompts: Prompts) -> None:
    any_engine.add("dense", prompts(12), 100, "dense")
    any_engine.add("policy", prompts(12), 100)
    for _ in range(60):
        any_engine.step()
    any_engine.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    reports = [out.kv_cache for out in any_engine.run().values()]
    assert [report["preemptions"] for report in reports] == [1, 1]
    assert reports[0]["replayed_tokens"] == reports[1]["replayed_tokens"] >= 60


def test_a_preempted_request_finished_by_output_in_flight_reports_what_shaped_it(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts
) -> None:
    """Asynchronous: the last token arrives although its request has just lost its cache."""
    finished_without_cache = 0
    with engine(
        tiny_model,
        asynchronous=True,
        kv_cache_policy=POLICY,
        num_gpu_blocks_override=10,
        max_model_len=144,
        enable_prefix_caching=False,
    ) as running:
        for max_tokens in range(56, 68):
            running.add("neighbour", prompts(20), 120, "dense")
            running.add("r", prompts(24), max_tokens)
            output = running.run()["r"]
            assert_exact(tiny_oracle, output)
            report, computed = output.kv_cache, 24 + max_tokens - 1
            assert report["rounds"] == (computed - 1 - 57) // 8 + 1
            assert report["evicted_tokens"] == 1 + 8 * (report["rounds"] - 1)
            assert report["physical_tokens"] == computed - report["evicted_tokens"]
            no_replay = report["preemptions"] and not report["replayed_tokens"]
            finished_without_cache += bool(no_replay)
    assert finished_without_cache, "no request was finished while preempted: nothing is tested"


@pytest.mark.parametrize("num_steps", [8, 100])
def test_an_aborted_request_has_the_report_known_so_far(
    any_engine: Engine, prompts: Prompts, num_steps: int
) -> None:
    any_engine.add("gone", prompts(12), 300)
    for _ in range(num_steps):
        any_engine.step()
    states = any_engine.llm.llm_engine.output_processor.request_states
    state = next(iter(states.values()))
    # What `abort_requests` makes of it for a client that is still listening.
    output = state.make_request_output([], None, FinishReason.ABORT, None)
    assert output.kv_cache["policy"] == "randkv"
    assert output.kv_cache["request_key"] == "gone"
    assert (output.kv_cache["rounds"] > 0) is (num_steps == 100)
    any_engine.llm.llm_engine.abort_request(["gone"])
    any_engine.run()


def test_an_aborted_request_does_not_disturb_reports(any_engine: Engine, prompts: Prompts) -> None:
    any_engine.add("gone", prompts(12), 300)
    any_engine.add("stays", prompts(12), 150)
    for _ in range(100):
        any_engine.step()
    any_engine.llm.llm_engine.abort_request(["gone"])
    assert any_engine.run()["stays"].kv_cache["rounds"] > 5


@pytest.mark.parametrize("policy", [None, "dense"])
def test_off_and_dense_engines(
    tiny_model: Path, tiny_oracle: Oracle, prompts: Prompts, policy: str | None
) -> None:
    """None refuses overrides and reports nothing; "dense" takes them."""
    with engine(tiny_model, kv_cache_policy=policy) as running:
        prompt = prompts(30)
        override = {"type": "randkv", "budget": 32, "buffer_size": 4}
        if policy is None:
            with pytest.raises(RandKVConfigError, match="runs without kv_cache_policy"):
                running.add("r", prompt, 100, override)
            running.add("plain", prompt, 100)
            running.add("null", prompt, 100, extra_args={"kv_cache_policy": None})
            outputs = running.run()
            assert outputs["plain"].kv_cache is outputs["null"].kv_cache is None
            assert running.scheduler.kv_cache_policy is None
            assert running.runner.kv_cache_policy is None
        else:
            running.add("r", prompt, 100, override)
            running.add("plain", prompt, 100)
            outputs = running.run()
            assert policy_of(outputs["plain"]).config is None
            assert outputs["r"].kv_cache["rounds"] > 10
            assert_all_exact(tiny_oracle, outputs.values())


def test_streaming_input_sessions_are_refused(any_engine: Engine, prompts: Prompts) -> None:
    processor = any_engine.llm.llm_engine.input_processor
    for override, refused in ((None, True), ("dense", False)):
        params = SamplingParams(
            max_tokens=5,
            detokenize=False,
            extra_args=None if override is None else {"kv_cache_policy": override},
        )
        arguments = ("r", TokensPrompt(prompt_token_ids=prompts(5)), params, ("generate",))
        if refused:
            with pytest.raises(RandKVConfigError, match="streaming-input session"):
                processor.process_inputs(*arguments, resumable=True)
        else:
            assert processor.process_inputs(*arguments, resumable=True).resumable


def test_beam_search_is_refused(any_engine: Engine, prompts: Prompts) -> None:
    with pytest.raises(RandKVConfigError, match="beam search"):
        any_engine.llm.beam_search(
            [TokensPrompt(prompt_token_ids=prompts(5))],
            BeamSearchParams(beam_width=2, max_tokens=3),
        )


def test_llm_generate_rejects_one_and_keeps_serving(any_engine: Engine, prompts: Prompts) -> None:
    """`LLM.generate` raises for the call, aborts what the call had added, and stays usable."""
    good = SamplingParams(max_tokens=80, detokenize=False, ignore_eos=True)
    bad = SamplingParams(
        max_tokens=80, detokenize=False, extra_args={"kv_cache_policy": {"type": "randkv", "x": 1}}
    )
    batch = [TokensPrompt(prompt_token_ids=prompts(9)) for _ in range(2)]
    with pytest.raises(RandKVConfigError, match="kv_cache_policy.x"):
        any_engine.llm.generate(batch, [good, bad], use_tqdm=False)
    assert any_engine.run() == {}
    outputs = any_engine.llm.generate(batch, good, use_tqdm=False)
    assert all(out.kv_cache["rounds"] > 0 for out in outputs)
    any_engine.check_pool()
