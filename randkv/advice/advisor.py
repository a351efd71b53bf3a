# SPDX-License-Identifier: Apache-2.0
"""What each budget costs and keeps, and which one to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from randkv.advice.memory import GIB, KVMemory
from randkv.advice.step_time import StepTime
from randkv.advice.survival import (
    Tokens,
    share_kept,
    share_of_output_kept,
    units_over_life,
)
from randkv.advice.workload import Workload
from randkv.config import RandKVConfig, check_integer
from randkv.errors import RandKVConfigError
from randkv.planner import rounds_run

MAX_BUDGETS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What budgets are compared for.

    Attributes:
        bytes_per_token: KV bytes of one token on one GPU.
        memory: KV memory of one GPU.
        concurrency: Requests that should run at once; None where no number is wanted.
        step_time: None where nothing is known about time.
    """

    workload: Workload
    bytes_per_token: int
    memory: KVMemory
    block_size: int = 16
    concurrency: int | None = None
    step_time: StepTime | None = None

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 1, 2**16)
        if self.concurrency is not None:
            check_integer("concurrency", self.concurrency, 1, 2**20)
        if self.num_blocks < 1:
            raise self.too_small(2 * self.block_bytes, "two blocks")

    @property
    def block_bytes(self) -> int:
        """On one GPU, over all layers."""
        return self.block_size * self.bytes_per_token

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks(self.block_bytes)

    def too_small(self, least_bytes: int, what: str) -> RandKVConfigError:
        """The error of a memory below the `least_bytes` that `what` takes."""
        return RandKVConfigError(
            "kv_memory",
            round(self.memory.num_bytes / GIB, 4),
            f"at least {math.ceil(least_bytes / GIB * 1e4) / 1e4} GiB per GPU, for {what}",
            "Use a larger GPU or more of them, a smaller budget, or --kv-cache-dtype fp8.",
        )

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Held:
    """What requests hold under one policy, and how many of them fit.

    Attributes:
        tokens: The longest that a request is in the cache.
        kv_bytes: Of `tokens`, whole blocks, one GPU.
        mean_tokens: Over the lives of all requests.
        requests: That fit when each is at `tokens`: none is ever preempted.
        requests_half_grown: That fit at their mean length, which is what vLLM admits on average;
            some are preempted whenever many are old at once. 0 where `requests` is.
        tokens_per_second: Modelled output of `requests_half_grown`, at most the concurrency;
            None without a step time.
    """

    tokens: int
    blocks: int
    kv_bytes: int
    mean_tokens: float
    requests: int
    requests_half_grown: int
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Option:
    """One budget.

    Attributes:
        over_dense: `requests` over dense ones; None where no dense one fits.
        half_grown_over_dense: `requests_half_grown` over dense ones.
        modelled_speedup: `tokens_per_second` over dense; None without a step time.
        rounds: Of a request with the planned prompt and output.
        share_of_output_kept: Of its generated tokens, at the end.
        share_kept: By age, in tokens decoded since; share that a KV head holds at the end.
        generated_per_place: Output tokens per position that the prompt leaves, ``O / (K - P)``;
            None when it leaves none.
        refused_share: Share of the workload's prompts that are longer than the budget.
    """

    budget: int
    buffer_size: int
    held: Held
    over_dense: float | None
    half_grown_over_dense: float | None
    modelled_speedup: float | None
    rounds: int
    share_of_output_kept: float
    share_kept: dict[int, float]
    generated_per_place: float | None
    refused_share: float

    def to_dict(self) -> dict[str, Any]:
        shares = {str(age): share for age, share in self.share_kept.items()}
        return asdict(self) | {"share_kept": shares}


def default_budgets(workload: Workload) -> list[int]:
    """Powers of two from the first that holds the prompt, below the longest request's length."""
    budgets = [1 << (workload.prompt_tokens - 1).bit_length()]
    while budgets[-1] * 2 < workload.longest_tokens:
        budgets.append(budgets[-1] * 2)
    return budgets


def ages(output_tokens: int) -> list[int]:
    """Three ages that generated tokens have at the end: powers of two, each four times the last.

    The oldest is the largest power of two that a token decoded before the end can reach.
    """
    oldest = (output_tokens - 1).bit_length() - 1
    return [1 << power for power in (oldest - 4, oldest - 2, oldest) if power >= 0]


def _held(plan: Plan, config: RandKVConfig | None, prompts: Tokens, outputs: Tokens) -> Held:
    steps = int(outputs.sum())
    longest = int((prompts + outputs).max())
    tokens = longest if config is None else min(config.max_physical_len, longest)
    mean_tokens, mean_blocks = (
        int(units_over_life(config, prompts, outputs, unit).sum()) / steps
        for unit in (1, plan.block_size)
    )
    requests = max(0, plan.num_blocks // plan.blocks(tokens))
    half_grown = int(plan.num_blocks / mean_blocks) if requests else 0
    speed = None
    if plan.step_time is not None and requests:
        running = min(half_grown, plan.concurrency or half_grown)
        speed = plan.step_time.tokens_per_second(running, mean_tokens * plan.bytes_per_token)
    kv_bytes = plan.blocks(tokens) * plan.block_bytes
    return Held(tokens, plan.blocks(tokens), kv_bytes, mean_tokens, requests, half_grown, speed)


def dense(plan: Plan) -> Held:
    """What the full cache holds."""
    return _held(plan, None, plan.workload.prompts, plan.workload.outputs)


def _ratio(value: float | None, over: float | None) -> float | None:
    return value / over if value is not None and over else None


def option(plan: Plan, full: Held, config: RandKVConfig) -> Option:
    """What `config` costs and keeps; prompts longer than its budget are left out.

    Raises:
        RandKVConfigError: The budget does not hold the planned prompt.
    """
    work = plan.workload
    prompt, output = work.prompt_tokens, work.output_tokens
    if config.budget < prompt:
        kind = "95 % of the log's prompts, up to" if work.is_log else "the prompt's"
        raise RandKVConfigError(
            "budget",
            config.budget,
            f"at least {kind} {prompt} tokens, all of which are kept",
            "Raise the budget or shorten the prompt.",
            "long_prompt",
        )
    fits = work.prompts <= config.budget
    held = _held(plan, config, work.prompts[fits], work.outputs[fits])
    computed = prompt + output - 1
    return Option(
        config.budget,
        config.buffer_size,
        held,
        _ratio(held.requests, full.requests),
        _ratio(held.requests_half_grown, full.requests_half_grown),
        _ratio(held.tokens_per_second, full.tokens_per_second),
        rounds_run(config, computed),
        share_of_output_kept(config, prompt_tokens=prompt, output_tokens=output),
        {
            age: share_kept(
                config,
                prompt_tokens=prompt,
                computed_tokens=computed,
                position=computed - 1 - age,
            )
            for age in ages(output)
        },
        output / (config.budget - prompt) if config.budget > prompt else None,
        float(np.mean(~fits)),
    )


def compare(
    plan: Plan, buffer_size: int, budgets: Sequence[int] | None = None
) -> tuple[Held, list[Option]]:
    """Dense, and every budget in ascending order; `default_budgets` where none are given.

    Raises:
        RandKVConfigError: A budget does not hold the prompt, or nothing fits into the memory.
    """
    chosen = sorted(set(budgets)) if budgets else default_budgets(plan.workload)
    check_integer("number of budgets", len(chosen), 1, MAX_BUDGETS)
    full = dense(plan)
    options = [option(plan, full, RandKVConfig(budget, buffer_size)) for budget in chosen]
    if not full.requests and not any(o.held.requests for o in options):
        least = min(o.held.kv_bytes for o in options) + plan.block_bytes
        raise plan.too_small(least, "one request at the smallest budget")
    return full, options
