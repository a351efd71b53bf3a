# SPDX-License-Identifier: Apache-2.0
"""Which of the compared budgets to take, and why. Every rule is a sentence of `reasons`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from randkv.advice.advisor import Held, Option, Plan
from randkv.advice.memory import GIB
from randkv.config import RandKVConfig

PAPER = "arXiv 2609.03430"
USUAL_PER_PLACE = 5.0
"""Generated tokens per place below which a budget is recommended without being asked for.

Source: MATH500 in the paper, 5,300 generated tokens on average at K = 1024.
"""
MOST_PER_PLACE = 8.0
"""From here on a budget is never recommended: the paper's accuracy collapses from 8 to 16 on."""
NOT_MEMORY_BOUND = 8192
"""Output tokens up to which the paper's runs were slower with the policy than without."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`budget` is None for dense; `requests` is how many fit, as `_fitting` counts them.

    Where that is none, nothing is recommended: every budget that fits is unfit for the output.
    """

    budget: int | None
    buffer_size: int | None
    requests: int
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        if self.requests == 0:
            return "nothing"
        return "dense" if self.budget is None else f"budget {self.budget:,}"

    @property
    def policy(self) -> dict[str, Any] | None:
        """None where nothing is recommended."""
        if self.requests == 0:
            return None
        if self.budget is None or self.buffer_size is None:
            return {"type": "dense"}
        return {"type": "randkv", "budget": self.budget, "buffer_size": self.buffer_size}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"reasons": list(self.reasons), "policy": self.policy}


def _fitting(plan: Plan, held: Held) -> int:
    """Requests that fit at their longest; of a log at their mean, which is then known."""
    return held.requests_half_grown if plan.workload.is_log else held.requests


def _lengths(plan: Plan) -> str:
    return "at their mean length" if plan.workload.is_log else "at their longest"


def _dense(plan: Plan, full: Held, reason: str) -> Recommendation:
    reasons = [reason]
    if full.requests == 0:
        least = math.ceil((full.kv_bytes + plan.block_bytes) / GIB * 100) / 100
        reasons.append(
            f"Not one dense request of full length fits either: it takes {least:,.2f} GiB for KV "
            "per GPU. Add memory or GPUs, use --kv-cache-dtype fp8, list a --budget in between, or "
            "plan for shorter outputs."
        )
    return Recommendation(None, None, _fitting(plan, full), tuple(reasons))


def _is_crowded(option: Option, most: float) -> bool:
    return option.generated_per_place is None or option.generated_per_place >= most


def _loss(option: Option, prompt_tokens: int) -> str:
    per_place = option.generated_per_place or 0.0
    text = (
        f"{per_place:.1f} generated tokens come to each of the "
        f"{option.budget - prompt_tokens:,} positions beside the prompt"
    )
    if per_place <= 1:
        return f"{text}: little is evicted."
    figures = (
        f"In the paper ({PAPER}), at about 5, MATH500 fell from .939 to .874 (Qwen3-4B), and "
        "accuracy collapsed from 8 to 16 on."
    )
    warning = " Measure the quality of this budget first." if per_place >= USUAL_PER_PLACE else ""
    return f"{text}. {figures}{warning}"


def _chosen(plan: Plan, eligible: Sequence[Option]) -> tuple[Option | None, list[str]]:
    """The budget among `eligible`, ascending and none too crowded, and why this one."""
    if plan.concurrency is None:
        usual = [o for o in eligible if not _is_crowded(o, USUAL_PER_PLACE)]
        if not usual:
            return None, []
        return usual[0], [
            f"It is the smallest budget listed with fewer than {USUAL_PER_PLACE:.0f} generated "
            "tokens per position beside the prompt."
        ]
    enough = [o for o in eligible if _fitting(plan, o.held) >= plan.concurrency]
    if enough:
        return enough[-1], [
            f"It is the largest budget listed at which the wanted {plan.concurrency:,} requests "
            f"fit {_lengths(plan)}; a smaller one would only keep less."
        ]
    if not eligible:
        return None, []
    most = _fitting(plan, eligible[0].held)
    return eligible[0], [
        f"It holds {most:,} of the wanted {plan.concurrency:,} requests, the most of the budgets "
        "listed that are not too small for the output. The others wait: add memory or GPUs, or "
        "use --kv-cache-dtype fp8."
    ]


def recommend(plan: Plan, full: Held, options: Sequence[Option]) -> Recommendation:
    """One of `options`, or dense where the policy would bring nothing or cost too much."""
    wanted = plan.concurrency
    fitting = _fitting(plan, full)
    if wanted is not None and fitting >= wanted:
        return _dense(
            plan,
            full,
            f"The wanted {wanted:,} requests fit with the full cache {_lengths(plan)} ({fitting:,} "
            "do): the policy would lose tokens and bring nothing.",
        )
    reached = [o for o in options if o.rounds]
    if not reached:
        first = RandKVConfig(options[0].budget, options[0].buffer_size).compacted_len
        return _dense(
            plan,
            full,
            f"The output ends before a request holds more than K + r = {first:,} tokens, at the "
            "smallest budget listed: no round would ever run.",
        )
    eligible = [o for o in reached if o.held.requests and not _is_crowded(o, MOST_PER_PLACE)]
    option, reasons = _chosen(plan, eligible)
    if option is None:
        limit = USUAL_PER_PLACE if eligible else MOST_PER_PLACE
        return _dense(
            plan,
            full,
            f"Every budget listed that the output outgrows and the memory holds has {limit:.0f} or "
            "more generated tokens to each position beside the prompt; in the paper "
            f"({PAPER}) accuracy collapsed from 8 to 16 on. A larger --budget may do.",
        )
    held = option.held
    if held.requests_half_grown <= full.requests_half_grown:
        return _dense(
            plan,
            full,
            f"At budget {option.budget:,} {held.requests_half_grown:,} requests fit at their mean "
            f"length, and {full.requests_half_grown:,} dense ones do: the policy would bring "
            "nothing.",
        )
    if full.requests == 0:
        reasons.append("Not one dense request of full length fits.")
    else:
        reasons.append(
            f"At their longest {held.requests:,} requests fit and {full.requests:,} dense ones; at "
            f"their mean length {held.requests_half_grown:,} and {full.requests_half_grown:,}."
        )
    reasons.append(_loss(option, plan.workload.prompt_tokens))
    return Recommendation(option.budget, option.buffer_size, _fitting(plan, held), tuple(reasons))


def notes(plan: Plan, max_position_embeddings: int | None) -> list[str]:
    """What a reader of the figures has to know."""
    work, step = plan.workload, plan.step_time
    found = []
    if step is None:
        found.append(
            "Ratios are of concurrent requests, not of speed. Give --latency or "
            "--memory-bandwidth for a modelled speed-up."
        )
    elif step.kind == "roofline":
        found.append(
            "Speed-ups are modelled, not measured, and the most that the bandwidth allows: "
            "attention at full bandwidth, nothing per sequence. The paper's measured ones are far "
            "smaller (docs/budget.md)."
        )
    else:
        found.append(f"Speed-ups are modelled, not measured, with the constants of: {step.source}.")
    if work.output_tokens <= NOT_MEMORY_BOUND:
        found.append(
            f"Outputs are short. The paper ({PAPER}) measured 0.52x to 0.96x the tokens/s of the "
            "full cache at 1k in, 8k out, where memory is no bottleneck: measure before use."
        )
    if work.is_log:
        found.append(
            "Prompt and output to plan for are the 95th percentiles of the log. A request with "
            "n > 1 is one line there and counts as one long output."
        )
    if max_position_embeddings is not None and work.longest_tokens > max_position_embeddings:
        found.append(
            f"{work.longest_tokens:,} tokens are more than the model's "
            f"{max_position_embeddings:,} positions: vLLM refuses them unless the config scales "
            "its rotary positions."
        )
    return found
