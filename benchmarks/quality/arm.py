# SPDX-License-Identifier: Apache-2.0
"""An arm: one way to run a prompt, and the evictions that it must then have done. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from randkv.config import RandKVConfig
from randkv.planner import first_due, physical_len, rounds_run


class Evictions(NamedTuple):
    """Of one request: rounds, and positions that each KV head dropped."""

    rounds: int
    evicted_tokens: int


class Arm(BaseModel):
    """Dense, RandKV, or the window of benchmarks/window.py at the same budget and buffer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["dense", "randkv", "window"]
    budget: int = Field(0, ge=0, description="K, tokens; 0 for dense")
    buffer_size: int = Field(0, ge=0, description="r, tokens; 0 for dense")

    @property
    def name(self) -> str:
        return "dense" if self.is_dense else f"{self.kind} K={self.budget} r={self.buffer_size}"

    @property
    def is_dense(self) -> bool:
        return self.kind == "dense"

    @property
    def config(self) -> RandKVConfig:
        return RandKVConfig(self.budget, self.buffer_size)

    def policy(self, request_key: str) -> dict[str, Any]:
        """``kv_cache_policy`` of a request. The window is the engine's doing, not the request's."""
        if self.is_dense:
            return {"type": "dense", "request_key": request_key}
        return {**self.config.to_dict(), "request_key": request_key}

    def evictions(self, prompt_len: int, output_len: int) -> Evictions:
        """What a request of this length must report at its end.

        The last output token is never computed.
        """
        if self.is_dense:
            return Evictions(0, 0)
        computed = prompt_len + output_len - 1
        evicted = computed - physical_len(self.config, computed)
        return Evictions(rounds_run(self.config, computed), evicted)

    def evicts(self, prompt_len: int, output_len: int) -> bool:
        return self.evictions(prompt_len, output_len).rounds > 0

    def first_affected(self, prompt_len: int) -> int:
        """Index of the first output token that was predicted from a compacted cache.

        The round at `C` computed tokens comes before token `C` is computed, which predicts
        token ``C + 1``.
        """
        return first_due(self.config) + 1 - prompt_len


DENSE = Arm(kind="dense")


def arms(budgets: Iterable[int], buffers: Iterable[int], has_window: bool) -> list[Arm]:
    """Dense first, then by budget and buffer size."""
    kinds: tuple[Literal["randkv", "window"], ...] = ("randkv", "window")
    return [
        DENSE,
        *(
            Arm(kind=kind, budget=budget, buffer_size=buffer)
            for budget in budgets
            for buffer in buffers
            for kind in kinds[: 2 if has_window else 1]
        ),
    ]
