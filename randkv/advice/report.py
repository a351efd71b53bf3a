# SPDX-License-Identifier: Apache-2.0
"""The advice as a whole: JSON-ready, as text, and as options to start the server with."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from randkv.advice.advisor import Held, Option, Plan, ages
from randkv.advice.memory import DEFAULT_UTILIZATION, GIB, Weights
from randkv.advice.model_shape import ModelShape
from randkv.advice.recommendation import Recommendation

SCHEMA = 1
_WIDTH = 100
_SMALLEST_MAX_NUM_SEQS = 256
"""vLLM 0.28.0's default where it is smallest, on GPUs below 70 GiB."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything that a run of the advisor found."""

    shape: ModelShape
    num_ranks: int
    weights: Weights | None
    plan: Plan
    dense: Held
    options: Sequence[Option]
    recommendation: Recommendation
    notes: Sequence[str]
    asked_dtype: str = "auto"

    @property
    def server_options(self) -> list[str]:
        """Options of ``python -m server`` for the recommendation; none where it is nothing."""
        plan, memory, work = self.plan, self.plan.memory, self.plan.workload
        policy = self.recommendation.policy
        if policy is None:
            return []
        shown = json.dumps(policy, separators=(",", ":")) if len(policy) > 1 else "dense"
        found = ["--kv-cache-policy", shown]
        if self.dense.requests == 0:  # vLLM's start wants room for one of max_model_len
            found += ["--kv-cache-policy-limits", '{"allow_dense":false}']
        longest = self.shape.max_position_embeddings or 2**31
        if not work.is_log and work.longest_tokens < longest:
            found += ["--max-model-len", str(work.longest_tokens)]
        requests = min(self.recommendation.requests, plan.concurrency or 2**31)
        if requests > _SMALLEST_MAX_NUM_SEQS:
            found += ["--max-num-seqs", str(requests)]
        if self.num_ranks > 1:
            found += ["--tensor-parallel-size", str(self.num_ranks)]
        if self.asked_dtype != "auto":
            found += ["--dtype", self.asked_dtype]
        if self.shape.kv_dtype != self.shape.dtype:
            found += ["--kv-cache-dtype", self.shape.kv_dtype]
        if plan.block_size != 16:
            found += ["--block-size", str(plan.block_size)]
        if memory.utilization not in (None, DEFAULT_UTILIZATION):
            found += ["--gpu-memory-utilization", f"{memory.utilization:g}"]
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. `schema` grows when a field changes its meaning or goes away."""
        plan = self.plan
        return {
            "schema": SCHEMA,
            "model": {
                **asdict(self.shape),
                "tensor_parallel_size": self.num_ranks,
                "kv_bytes_per_token_per_gpu": plan.bytes_per_token,
                "weights_bytes": self.weights and self.weights.num_bytes,
                "weights_from": self.weights and self.weights.how,
            },
            "memory": {
                "kv_bytes_per_gpu": plan.memory.num_bytes,
                "gpu_bytes": plan.memory.gpu_bytes,
                "gpu_memory_utilization": plan.memory.utilization,
                "weights_bytes_per_gpu": plan.memory.weights_bytes,
                "allowance_bytes": plan.memory.allowance_bytes,
                "block_size": plan.block_size,
                "num_blocks": plan.num_blocks,
            },
            "workload": {**plan.workload.to_dict(), "concurrency": plan.concurrency},
            "step_time": plan.step_time and plan.step_time.to_dict(),
            "dense": asdict(self.dense),
            "budgets": [option.to_dict() for option in self.options],
            "recommendation": {
                **self.recommendation.to_dict(),
                "server_options": self.server_options,
            },
            "notes": list(self.notes),
        }


def _gib(num_bytes: float) -> str:
    unit, size = ("GiB", GIB) if num_bytes >= GIB else ("MiB", 2**20)
    return f"{num_bytes / size:,.2f} {unit}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _head(of: Advice) -> list[str]:
    plan, shape, memory, work = of.plan, of.shape, of.plan.memory, of.plan.workload
    per_gpu = f" on each of {of.num_ranks} GPUs" if of.num_ranks > 1 else ""
    lines = [
        f"Model   {shape.name}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of "
        f"{shape.head_size}, KV cache {shape.kv_dtype}: {plan.bytes_per_token:,} bytes per token"
        f"{per_gpu}"
    ]
    total = (
        f"{_gib(memory.num_bytes)} for KV: {plan.num_blocks:,} blocks of {plan.block_size} tokens"
    )
    if memory.gpu_bytes is None or of.weights is None:
        lines.append(f"Memory  {total}")
    else:
        lines.append(
            f"Memory  {_gib(memory.gpu_bytes)} x {memory.utilization:g}, less "
            f"{_gib(memory.weights_bytes or 0)} of weights ({of.weights.how})\n        and "
            f"{_gib(memory.allowance_bytes or 0)} assumed for the rest, leaves {total}"
        )
    if work.is_log:
        lengths = (
            f"{len(work.prompts):,} requests of {work.source}: prompt {work.prompt_tokens:,} and "
            f"output {work.output_tokens:,} tokens (95 % are no longer), longest "
            f"{work.longest_tokens:,}\n        ({work.skipped_requests:,} unanswered requests and "
            f"{work.skipped_lines:,} other lines skipped)"
        )
    else:
        lengths = (
            f"prompt {work.prompt_tokens:,} and output {work.output_tokens:,} tokens, as given"
        )
    return [*lines, f"Work    {lengths}"]


def _row(of: Advice, name: str, held: Held, ratios: Sequence[float | None]) -> list[str]:
    longest, half_grown, speedup = map(_ratio, ratios)
    row = [name, _gib(held.kv_bytes), f"{held.requests:,}", longest]
    row += [f"{held.requests_half_grown:,}", half_grown]
    return row + [speedup] * (of.plan.step_time is not None)


def _table(of: Advice) -> list[list[str]]:
    shown = ages(of.plan.workload.output_tokens)
    has_refused = any(o.refused_share for o in of.options)
    head = ["budget", "KV/request", "longest", "ratio", "mean", "ratio"]
    head += ["modelled"] * (of.plan.step_time is not None)
    rows = [[*head, "kept", *(f"{age:,}" for age in shown), "crowd", *["refused"] * has_refused]]
    for o in of.options:
        ratios = o.over_dense, o.half_grown_over_dense, o.modelled_speedup
        row = _row(of, f"{o.budget:,}", o.held, ratios)
        row += [f"{share:.1%}" for share in (o.share_of_output_kept, *o.share_kept.values())]
        row += ["-" if o.generated_per_place is None else f"{o.generated_per_place:.1f}"]
        rows.append(row + [f"{o.refused_share:.1%}"] * has_refused)
    ones = [1.0 if of.dense.requests else None] * 3
    return [*rows, _row(of, "dense", of.dense, ones)]


def _legend(of: Advice) -> list[str]:
    lines = [
        "KV/request  at its longest, whole blocks: K + 2r tokens, dense prompt + output",
        "longest     requests that fit, each at its longest: none is ever preempted",
        "mean        requests that fit at the mean length over their lives; some get preempted",
        "ratio       of these requests over dense ones: of concurrency, not of speed",
    ]
    if of.plan.step_time is not None:
        lines.append("modelled    output tokens/s over dense, of the requests under mean, from")
        lines.append(f"            {of.plan.step_time.source}")
    lines += [
        "kept        share of the generated tokens that a KV head holds at the end: of all, and of",
        "            those of the given age, counted in tokens decoded since",
        "crowd       generated tokens per position beside the prompt, O / (K - P)",
    ]
    if any(o.refused_share for o in of.options):
        lines.append("refused     share of the log's prompts that are longer than the budget")
    return lines


def _wrapped(text: str, first: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
    )


def to_text(of: Advice) -> str:
    """A table for a terminal, the recommendation with its reasons, the options to paste."""
    rows = _table(of)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]
    chosen = of.recommendation
    lines = [*_head(of), "", *table, "", *_legend(of), "", f"Recommended: {chosen.name}"]
    lines += [_wrapped(reason, "  - ") for reason in chosen.reasons]
    lines += ["", *(_wrapped(note, "Note: ") for note in of.notes)]
    if of.server_options:
        lines += ["", shlex.join(of.server_options)]
    return "\n".join(lines) + "\n"
