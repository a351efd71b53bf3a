# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in this process, with its insides in reach."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from randkv.config import RandKVConfig, RequestPolicy
from randkv.planner import RoundPlan
from tests.engine.on_worker import remembered
from tests.engine.oracle import Comparison, Oracle

POLICY: dict[str, Any] = {"type": "randkv", "budget": 48, "buffer_size": 8}
"""What most tests run: rounds come early, and often."""

MAX_STEPS = 30_000
"""More than any test here needs; a request that hangs fails its test instead of stopping it."""

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 16,
    "num_gpu_blocks_override": 512,
    "max_model_len": 2048,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": True,
    # vLLM's CPU worker refuses to start unless this share of the memory is free.
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2**30,
}


@contextmanager
def _asynchronous_scheduling() -> Iterator[None]:
    """Turn on what vLLM's CPU platform turns off after reading the flag."""
    original = CpuPlatform.check_and_update_config.__func__

    def keep_asynchronous(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep_asynchronous)):
        yield


class Engine:
    """One engine. `step` and `add` drive it by hand; `run` until everything has finished."""

    def __init__(self, model: Path, *, asynchronous: bool = False, **options: Any) -> None:
        arguments = {**DEFAULTS, **options}
        if not (model / "tokenizer.json").exists():
            arguments["skip_tokenizer_init"] = True
        if asynchronous:
            with _asynchronous_scheduling():
                self.llm = LLM(model=str(model), async_scheduling=True, **arguments)
        else:
            self.llm = LLM(model=str(model), **arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        assert self.core.vllm_config.scheduler_config.async_scheduling is asynchronous
        self.num_blocks = self.pool.get_num_free_blocks()
        self.most_running = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def runner(self) -> Any:
        """Of either kind."""
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def is_v2(self) -> bool:
        return not isinstance(self.runner, GPUModelRunner)

    def on_every_rank(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of ``function(worker, *args)``, by rank; after the steps scheduled so far."""
        results: list[Any] = self.core.model_executor.collective_rpc(function, args=args)
        return results

    def request(self, request_id: str) -> Request:
        """The scheduler's request with this external id."""
        return next(
            request
            for internal, request in self.scheduler.requests.items()
            if internal.rsplit("-", 1)[0] == request_id
        )

    def blocks_of(self, request_id: str) -> Sequence[KVCacheBlock]:
        """Blocks that the request with this external id holds now, in slot order."""
        internal = self.request(request_id).request_id
        return self.scheduler.kv_cache_manager.get_blocks(internal).blocks[0]

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        policy: Any = None,
        *,
        priority: int = 0,
        **params: Any,
    ) -> None:
        settings = {
            "extra_args": None if policy is None else {"kv_cache_policy": policy},
            "temperature": 0.0,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self.llm.llm_engine.add_request(
            request_id,
            TokensPrompt(prompt_token_ids=list(prompt)),
            SamplingParams(max_tokens=max_tokens, **{**settings, **params}),
            priority=priority,
        )

    def step(self) -> list[RequestOutput]:
        """One step of the engine; the requests that it finished."""
        outputs = self.llm.llm_engine.step()
        self.most_running = max(self.most_running, len(self.scheduler.running))
        return [out for out in outputs if out.finished]

    def run(self) -> dict[str, RequestOutput]:
        """Step until nothing is left; outputs by external request id."""
        outputs: dict[str, RequestOutput] = {}
        for _ in range(MAX_STEPS):
            if not self.llm.llm_engine.has_unfinished_requests():
                self.check_pool()
                return outputs
            outputs.update((out.request_id, out) for out in self.step())
        raise AssertionError(f"unfinished after {MAX_STEPS} steps: {self.scheduler.requests}")

    def preempt(self, request_id: str) -> None:
        """Preempt one running request, the way the scheduler does when blocks run out."""
        request = self.request(request_id)
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())

    def check_pool(self) -> None:
        """Every block is back: nothing that ran here leaked one."""
        # A last empty step lets the worker and the scheduler drop what finished.
        self.llm.llm_engine.step()
        free = self.pool.get_num_free_blocks()
        assert free == self.num_blocks, f"{free} of {self.num_blocks} blocks are free"
        assert not [b for b in self.pool.blocks if b.ref_cnt and not b.is_null]
        if self.scheduler.kv_cache_policy is not None:
            for left in self.on_every_rank(remembered):
                assert not left, f"a worker remembers finished requests: {left}"

    def close(self) -> None:
        executor = self.core.model_executor
        queues = [
            getattr(executor, "rpc_broadcast_mq", None),
            *getattr(executor, "response_mqs", ()),
        ]
        contexts = [queue.local_socket.context for queue in queues if queue is not None]
        self.core.shutdown()
        for context in contexts:
            # Left to the garbage collector, it may wait for ever for sockets collected with it.
            context.destroy(linger=0)
        del executor, queues
        del self.core, self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


class Watcher:
    """Sees every step that the worker is told to run, just before it runs."""

    def __init__(self, running: Engine) -> None:
        self.running = running
        self.steps: list[SchedulerOutput] = []
        self._original = running.runner.execute_model
        running.runner.execute_model = self._watch

    def _watch(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return self._original(scheduler_output, *args, **kwargs)
        self.steps.append(scheduler_output)
        result = self._original(scheduler_output, *args, **kwargs)
        self.check()
        return result

    def check(self) -> None:
        """Rows of the block table are the requests' own blocks, long enough for their slots."""
        rows = self._rows_v2() if self.running.is_v2 else self._rows_v1()
        for request_id, own, row, seq_len in rows:
            assert row == own, (request_id, row, own)
            assert seq_len > 0
            block_size = self.running.core.vllm_config.cache_config.block_size
            assert len(own) == -(-seq_len // block_size), (request_id, seq_len, len(own))

    def _rows_v1(self) -> Iterator[tuple[str, list[int], list[int], int]]:
        """Of every request in the batch: its id, block ids, row, and physical length."""
        runner = self.running.runner
        batch = runner.input_batch
        table = batch.block_table[0]
        for index, request_id in enumerate(batch.req_ids):
            row = table.block_table.np[index, : table.num_blocks_per_row[index]].tolist()
            own = runner.requests[request_id].block_ids[0]
            yield request_id, own, row, int(runner.seq_lens[index])

    def _rows_v2(self) -> Iterator[tuple[str, list[int], list[int], int]]:
        runner = self.running.runner
        if runner.execute_model_state is None:
            return  # nothing was scheduled
        batch = runner.execute_model_state.input_batch
        tables = runner.block_tables
        for index, request_id in enumerate(batch.req_ids):
            number = runner.req_states.req_id_to_index[request_id]
            length = tables.num_blocks.gpu[0, number]
            row = tables.block_tables[0].gpu[number, :length].tolist()
            assert tables.input_block_tables[0][index, :length].tolist() == row
            own = runner.kv_cache_policy._blocks[request_id]
            yield request_id, own, row, int(batch.seq_lens[index])

    def stop(self) -> None:
        self.running.runner.execute_model = self._original

    @property
    def rounds(self) -> list[RoundPlan]:
        return [plan for step in self.steps for plan in step.kv_cache_rounds or ()]


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Engine]:
    started = Engine(model, **options)
    try:
        yield started
    finally:
        started.close()


def policy_of(output: RequestOutput) -> RequestPolicy:
    """The policy that the engine says it ran the request under."""
    report = output.kv_cache
    config = None
    if report["policy"] == "randkv":
        config = RandKVConfig(report["budget"], report["buffer_size"], report["seed"])
    return RequestPolicy(config, report["request_key"])


def compare(oracle: Oracle, output: RequestOutput) -> Comparison:
    """A finished greedy request with ``logprobs=0`` against the oracle."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = [step[t].logprob for step, t in zip(completion.logprobs, tokens, strict=True)]
    return oracle.compare(policy_of(output), list(output.prompt_token_ids), tokens, logprobs)


def assert_exact(oracle: Oracle, output: RequestOutput) -> None:
    """0 greedy tokens differ, log-probabilities within 1e-3 (float32)."""
    result = compare(oracle, output)
    assert result.num_different == 0, (output.request_id, result, output.kv_cache)
    assert result.max_logprob_error < 1e-3, (output.request_id, result, output.kv_cache)


def assert_all_exact(oracle: Oracle, outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        assert_exact(oracle, output)
