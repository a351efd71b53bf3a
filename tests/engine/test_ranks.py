# SPDX-License-Identifier: Apache-2.0
"""Several ranks, each its own process: the same keep-sets, tokens and counts as one rank."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from vllm import RequestOutput, SamplingParams, TokensPrompt, envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from randkv.compactor.base import PairCounts
from randkv.metrics import from_dict
from randkv.planner import RoundPlan
from randkv.stats import CompactionStats
from randkv.vllm import ranks
from randkv.vllm.ranks import compacted_pairs
from tests.engine.conftest import Prompts
from tests.engine.harness import DEFAULTS, Engine, assert_all_exact, engine
from tests.engine.models import make_qwen3_model, make_qwen3_moe_model
from tests.engine.on_worker import Cache, cache, untold
from tests.engine.oracle import Oracle

POLICY = {"type": "randkv", "budget": 24, "buffer_size": 4}
NUM_LAYERS, NUM_KV_HEADS = 3, 4
SMALL: dict[str, Any] = {
    "kv_cache_policy": POLICY,
    "num_gpu_blocks_override": 64,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 2**26,
    "disable_log_stats": False,
}
COMPUTED = 60
"""Tokens of the request whose cache is read: after eight rounds, with tokens beyond the last."""


class Observed(NamedTuple):
    """What a run showed. By rank: caches and the workers' own counts; `told` to the loggers."""

    outputs: dict[str, RequestOutput]
    caches: list[Cache]
    plans: list[RoundPlan]
    pairs: list[PairCounts]
    untold: list[CompactionStats | None]
    told: PairCounts
    told_while_running: bool
    rounds_told: int
    times_told: int


def observe(model: Path, **options: Any) -> Observed:
    """Four requests at once, one of them preempted, two sharing a prompt, one dense."""
    prompts = Prompts(3)
    with engine(model, **SMALL, **options) as running:
        # vLLM 0.28.0 makes the buffers of a later pipeline stage in its first dummy batch, which
        # on a CPU without compilation nothing else runs. Data parallel ranks of a mixture of
        # experts run dummy batches at any time, so there is a second one below.
        running.core.model_executor.execute_dummy_batch()
        plans, told = _watch(running)
        shared = prompts(20)
        running.add("read", prompts(10), 72)  # ends where the next round would be due
        running.add("preempted", shared, 65)
        running.add("shared", shared, 60, {"type": "randkv", "buffer_size": 6, "seed": 9})
        running.add("dense", prompts(5), 65, "dense")
        while running.request("read").num_computed_tokens < COMPUTED:
            running.step()
        state = running.request("read").kv_cache_state
        blocks = [block.block_id for block in running.blocks_of("read")]
        caches = running.on_every_rank(cache, blocks, COMPUTED - state.evicted_tokens)
        running.core.model_executor.execute_dummy_batch()
        running.preempt("preempted")
        outputs = running.run()
        pairs = running.on_every_rank(compacted_pairs)
        untold_stats = running.on_every_rank(untold)
    return Observed(
        outputs,
        caches,
        plans,
        pairs,
        untold_stats,
        PairCounts(
            sum(t.compaction.evicted_pairs for t in told),
            sum(t.compaction.copied_pairs for t in told),
        ),
        any(t.running and t.compaction.evicted_pairs for t in told),
        sum(t.rounds + t.replayed_rounds for t in told),
        sum(len(t.compaction.seconds) for t in told),
    )


def _watch(running: Engine) -> tuple[list[RoundPlan], list[Any]]:
    """Lists that fill: the rounds sent to the workers, what the stat loggers are told."""
    plans: list[RoundPlan] = []
    told: list[Any] = []
    policy = running.scheduler.kv_cache_policy
    take_rounds, make_stats = policy.take_rounds, running.scheduler.make_stats

    def watch_rounds(*args: Any) -> list[RoundPlan] | None:
        rounds: list[RoundPlan] | None = take_rounds(*args)
        plans.extend(rounds or ())
        return rounds

    def watch_stats(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        told.append(from_dict(stats.kv_cache_policy))
        return stats

    policy.take_rounds, running.scheduler.make_stats = watch_rounds, watch_stats
    return plans, told


@pytest.fixture(scope="module", autouse=True)
def _one_core_per_rank() -> Iterator[None]:
    """Threads of one rank wait for each other actively, which costs dearly where cores are shared.

    vLLM's CPU backend binds the threads of ranks that are processes of their own.
    """
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        binding = "|".join(str(cores[rank % len(cores)]) for rank in range(2))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
        patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
        envs.disable_envs_cache()  # an engine started before has read them all
        threads = torch.get_num_threads()
        torch._C.set_num_threads(1)  # vLLM's CPU worker takes away torch.set_num_threads
        yield
        torch._C.set_num_threads(threads)
    envs.disable_envs_cache()


TENSOR = {"distributed_executor_backend": "mp", "tensor_parallel_size": 2}
PIPELINE = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2}

CASES = {
    "tensor": (make_qwen3_model, TENSOR),
    "pipeline": (make_qwen3_model, PIPELINE),
    # One KV head on two ranks, and a mixture of experts.
    "replicated": (make_qwen3_moe_model, TENSOR),
}
Make = Callable[[Path], Path]


class Case(NamedTuple):
    """`several` ranks, to be compared with `one`."""

    name: str
    one: Observed
    several: Observed
    oracle: Oracle


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], tuple[Path, Observed]]:
    """A model's directory and what one rank does with it; run once per model."""
    seen: dict[Make, tuple[Path, Observed]] = {}

    def of(make: Make) -> tuple[Path, Observed]:
        if make not in seen:
            model = make(tmp_path_factory.mktemp("model"))
            seen[make] = model, observe(model)
        return seen[make]

    return of


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, one_rank: Callable[[Make], tuple[Path, Observed]]) -> Case:
    make, options = CASES[request.param]
    model, one = one_rank(make)
    return Case(request.param, one, observe(model, **options), Oracle(model))


def test_tokens_are_the_oracles(case: Case) -> None:
    for observed in (case.one, case.several):
        assert len(observed.outputs) == 4
        assert observed.outputs["preempted"].kv_cache["preemptions"] == 1
        assert observed.outputs["preempted"].kv_cache["replayed_tokens"] > 0
        assert_all_exact(case.oracle, observed.outputs.values())


def test_keep_sets_are_those_of_one_rank(case: Case) -> None:
    """In every slot of every (layer, KV head), the key and value of the same position."""
    (expected,) = case.one.caches
    for expected_part, parts in zip(expected, zip(*case.several.caches, strict=True), strict=True):
        if case.name == "pipeline":
            found = [np.concatenate(parts, axis=0)]
        elif case.name == "tensor":
            found = [np.concatenate(parts, axis=1)]
        else:
            found = list(parts)
        for part in found:
            np.testing.assert_allclose(part, expected_part, atol=1e-3)
    # That tells positions apart: no two slots of a head hold nearly the same key.
    keys = expected.keys
    distances = np.abs(keys[:, :, :, None] - keys[:, :, None]).max(axis=-1)
    slots = np.arange(keys.shape[2])
    assert distances[:, :, slots[:, None] != slots].min() > 0.05


def test_reports_are_those_of_one_rank(case: Case) -> None:
    """Also where the last token's step is under way when the next round would be due."""
    for request_id, output in case.several.outputs.items():
        assert output.kv_cache == case.one.outputs[request_id].kv_cache


def test_every_rank_counts_its_own_pairs(case: Case) -> None:
    several = case.several
    evicted_tokens = sum(plan.old_len - plan.new_len for plan in several.plans)
    assert several.rounds_told == len(several.plans) > 20
    num_pairs = case.one.caches[0].keys[:, :, 0, 0].size * evicted_tokens
    if case.name == "replicated":
        num_pairs *= 2  # each replica is a copy of its own, and moved on its own rank
    assert several.told == PairCounts(num_pairs, num_pairs)
    assert [sum(counts) for counts in zip(*several.pairs, strict=True)] == [num_pairs, num_pairs]
    layers_and_heads = [part.keys[:, :, 0, 0].size for part in several.caches]
    assert [pairs.evicted for pairs in several.pairs] == [
        size * evicted_tokens for size in layers_and_heads
    ]
    assert len({pairs.evicted for pairs in several.pairs}) == (2 if case.name == "pipeline" else 1)
    assert several.told_while_running
    assert not any(several.untold), "counts pile up on a rank"
    assert 0 < several.times_told <= len(several.plans)


def test_data_parallel_ranks_keep_the_same(
    one_rank: Callable[[Make], tuple[Path, Observed]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dense model: vLLM 0.28.0's CPU backend cannot share experts between such ranks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, _ = one_rank(make_qwen3_model)
    arguments = AsyncEngineArgs(
        **{**DEFAULTS, **SMALL},
        model=str(model),
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        data_parallel_size=2,
    )

    async def answers() -> list[RequestOutput]:
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            alone = await _answer(llm, "alone", 1)
            both = await asyncio.gather(_answer(llm, "first", 0), _answer(llm, "second", 1))
        finally:
            llm.shutdown()
        return [alone, *both]

    outputs = asyncio.run(answers())
    assert_all_exact(Oracle(model), outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.kv_cache for output in outputs] == 3 * [outputs[0].kv_cache]
    for rank, num_requests in ((0, 1), (1, 2)):
        evicted = REGISTRY.get_sample_value(
            "randkv_evicted_token_head_pairs_total",
            {"model_name": str(model), "engine": str(rank)},
        )
        assert (
            evicted
            == num_requests * NUM_LAYERS * NUM_KV_HEADS * outputs[0].kv_cache["evicted_tokens"]
        )


async def _answer(llm: AsyncLLM, request_id: str, rank: int) -> RequestOutput:
    params = SamplingParams(
        max_tokens=60,
        temperature=0.0,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_cache_policy": {"type": "randkv", "request_key": "same"}},
    )
    prompt = TokensPrompt(prompt_token_ids=Prompts(4)(12))
    answers = llm.generate(prompt, params, request_id, data_parallel_rank=rank)
    return [output async for output in answers][-1]


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "expected"),
    [(4, 1, [0]), (4, 2, [0, 2]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 0, 1, 1]), (1, 2, [0, 0])],
)
def test_the_first_kv_head_of_every_rank(
    monkeypatch: pytest.MonkeyPatch, num_kv_heads: int, num_ranks: int, expected: list[int]
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: num_kv_heads),
        parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks),
    )
    found = []
    for rank in range(num_ranks):
        monkeypatch.setattr(ranks, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        found.append(ranks.first_kv_head(config))
    assert found == expected


def test_ranks_are_waited_for_only_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(ranks, "monotonic", lambda: now)
    asked: list[Future[list[PairCounts]]] = []

    def ask(_: object) -> Future[list[PairCounts]]:
        asked.append(Future())
        return asked[-1]

    counts = ranks.RankCounts(ask)
    nothing = PairCounts(0, 0)
    assert counts.take(idle=True) == nothing
    assert not asked
    counts.on_compaction()
    assert counts.take(idle=False) == nothing  # asked, not waited for
    now = 5.0
    counts.on_compaction()
    assert counts.take(idle=False) == nothing
    assert len(asked) == 1  # one question at a time
    asked[0].set_result([PairCounts(6, 5), PairCounts(4, 3)])
    assert counts.take(idle=False) == PairCounts(10, 8)
    assert len(asked) == 2  # the rounds since then
    asked[1].set_result([PairCounts(6, 5), PairCounts(9, 9)])
    now = 5.5
    counts.on_compaction()
    assert counts.take(idle=False) == PairCounts(5, 6)
    assert len(asked) == 2  # not again within a second
    executor = ThreadPoolExecutor()
    late = executor.submit(lambda: [PairCounts(7, 5), PairCounts(9, 9)])
    counts._ask = lambda _: late
    assert counts.take(idle=True) == PairCounts(1, 0)
    assert counts.take(idle=True) == nothing
    executor.shutdown()
