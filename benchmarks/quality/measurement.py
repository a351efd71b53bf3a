# SPDX-License-Identifier: Apache-2.0
"""Runs requests on one real engine, many at a time, and makes records of what comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm
from vllm import RequestOutput

from benchmarks.quality.forcing import FIELD, ForcedTokens
from benchmarks.quality.plan import Request
from benchmarks.quality.record import Record
from benchmarks.quality.store import Store
from benchmarks.window import use_window
from randkv.compactor.pytorch import PyTorchCompactor
from tests.engine.harness import Engine, engine

LOGPROB_DIGITS = 6


@contextmanager
def quality_engine(
    model: Path, max_model_len: int, concurrency: int, kv_cache_bytes: int, **options: Any
) -> Iterator[Engine]:
    """float32, eager, all policies per request, tokens forced on request."""
    with engine(
        model,
        kv_cache_policy="dense",
        kv_cache_compactor="pytorch",
        logits_processors=[ForcedTokens],
        max_model_len=max_model_len,
        max_num_seqs=concurrency,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=kv_cache_bytes,
        **options,
    ) as running:
        yield running


def measure(
    running: Engine,
    todo: Iterable[Request],
    store: Store,
    *,
    concurrency: int,
    temperature: float,
    bar: tqdm[Any],
) -> None:
    """Run `todo`, RandKV and dense together and then the windows, and append a record of each.

    `bar` counts output tokens.
    """
    windows, others = [], []
    # The longest first, so that no long one is left to run alone.
    for request in sorted(todo, key=lambda request: -request.item.output_len):
        (windows if request.arm.kind == "window" else others).append(request)
    for queue, is_window in ((others, False), (windows, True)):
        if queue:
            _select(running, is_window)
            _drain(running, deque(queue), store, concurrency, temperature, bar)


def _select(running: Engine, is_window: bool) -> None:
    worker = running.core.model_executor.driver_worker.worker
    use_window(worker)
    if not is_window:
        worker.model_runner.kv_cache_policy.compactor.__class__ = PyTorchCompactor


def _drain(
    running: Engine,
    queue: deque[Request],
    store: Store,
    concurrency: int,
    temperature: float,
    bar: tqdm[Any],
) -> None:
    started: dict[str, Request] = {}
    done = bar.n
    while queue or started:
        while queue and len(started) < concurrency:
            request = queue.popleft()
            request_id = f"{request.arm.name}/{request.item.key}"
            started[request_id] = request
            _add(running, request_id, request, temperature)
        for output in running.step():
            record = _record(started.pop(output.request_id), output)
            store.append(record)
            done += record.output_len
        bar.n = done + sum(r.num_output_tokens for r in running.scheduler.running)
        bar.refresh()
    running.check_pool()


def _add(running: Engine, request_id: str, request: Request, temperature: float) -> None:
    arm, item = request
    params = {
        "extra_args": {"kv_cache_policy": arm.policy(item.key), FIELD: list(item.forced)},
        "logprobs": None if item.task == "free" else 1,
    }
    if item.num_free:
        # Token ids that end a generation get no probability.
        free = {"ignore_eos": False, "min_tokens": item.output_len}
        params |= {"temperature": temperature, "seed": item.seed, **free}
    running.add(request_id, item.prompt, item.output_len, **params)


def _record(request: Request, output: RequestOutput) -> Record:
    arm, item = request
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    assert tokens[: len(item.forced)] == list(item.forced), output.request_id
    report = output.kv_cache
    scored = slice(item.first_scored, None)
    steps = [] if item.task == "free" else completion.logprobs[scored]
    chosen = [step[token].logprob for step, token in zip(steps, tokens[scored], strict=False)]
    return Record(
        task=item.task,
        name=item.name,
        distance=item.distance,
        arm=arm,
        prompt_len=len(item.prompt),
        output_len=len(tokens),
        rounds=report["rounds"],
        evicted_tokens=report["evicted_tokens"],
        preemptions=report["preemptions"],
        first_scored=item.first_scored,
        tokens=tokens[scored],
        logprobs=[round(logprob, LOGPROB_DIGITS) for logprob in chosen],
        top_tokens=[
            next(token for token, logprob in step.items() if logprob.rank == 1) for step in steps
        ],
    )
