# SPDX-License-Identifier: Apache-2.0
"""What is known of one HTTP request while it runs, and the access log's line when it ends."""

from __future__ import annotations

import json
import os
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from randkv.vllm.report import COUNTS, KVCacheReport, summed

if TYPE_CHECKING:
    import asyncio

current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The record of the HTTP request that the running task serves."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request.

    Attributes:
        request_id: ``X-Request-Id``, the client's or ours.
        reports: The engine's report by (engine request, sample).
        open_samples: Engine requests begun and not finished.
        error_param: Field that vLLM's own error names.
        asked_policy: Type of the policy that the request asks for, or the default's.
    """

    request_id: str
    method: str
    path: str
    is_generation: bool
    task: asyncio.Task[Any] | None = None
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reports: dict[tuple[str, int], KVCacheReport] = field(default_factory=dict)
    finish_reasons: set[str] = field(default_factory=set)
    open_samples: int = 0
    asked_policy: str | None = None
    was_refused: bool = False
    had_error: bool = False
    error_param: str | None = None
    is_answered: bool = False

    def report(self) -> dict[str, Any] | None:
        """What the answer carries as ``kv_cache``.

        For several samples, counts are summed and ``samples`` has each one's own report.
        """
        reports = [self.reports[key] for key in sorted(self.reports)]
        if not reports:
            return None
        if len(reports) == 1:
            return dict(reports[0])
        keys = {report["request_key"] for report in reports}
        request_key = keys.pop() if len(keys) == 1 else None
        return {**summed(reports), "request_key": request_key, "samples": reports}

    @property
    def policy(self) -> str | None:
        """As reported by the engine; what was asked for, when it has not reported."""
        policies = {report["policy"] for report in self.reports.values()}
        return policies.pop() if len(policies) == 1 else self.asked_policy

    @property
    def outcome(self) -> str:
        if self.was_refused:
            return "refused"
        status = self.status or 0  # none: the client left before there was one
        if self.had_error or status >= 500 or "error" in self.finish_reasons:
            return "error"
        if status >= 400:
            return "refused"
        if self.open_samples or not self.is_answered or "abort" in self.finish_reasons:
            return "abort"
        return "length" if "length" in self.finish_reasons else "stop"

    def log_line(self) -> str:
        """One JSON object. Nothing of the request's content is in it."""
        now = time.monotonic()
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(now - self.started, 4),
        }
        if self.is_generation:
            report = self.report() or {}
            line |= {
                "outcome": self.outcome,
                "policy": self.policy,
                "budget": report.get("budget"),
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "first_token_seconds": self.first_token
                and round(self.first_token - self.started, 4),
                **{name: report.get(name, 0) for name in COUNTS},
            }
        return json.dumps(line)


def write_line(text: str) -> None:
    """One line to standard output; past vLLM, which prefixes what sys.stdout gets."""
    os.write(1, text.encode() + b"\n")
