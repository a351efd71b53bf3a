# SPDX-License-Identifier: Apache-2.0
"""The lengths of the requests to plan for: two numbers, or the server's access log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from randkv.advice.survival import Tokens
from randkv.config import check_integer
from randkv.errors import RandKVConfigError
from randkv.retention import MAX_COMPUTED_TOKENS

PERCENTILE = 95
_ANSWERED = ("stop", "length")
_LENGTHS = ("prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests by their lengths.

    Attributes:
        source: Where the lengths come from: ``given``, or the access log's path.
        prompts: Prompt tokens per request, at least 1.
        outputs: Output tokens per request, at least 1.
        skipped_requests: Requests in the log that did not run to their end.
        skipped_lines: Lines of the log that are not one of its own.
    """

    source: str
    prompts: Tokens
    outputs: Tokens
    skipped_requests: int = 0
    skipped_lines: int = 0

    @property
    def is_log(self) -> bool:
        return self.source != "given"

    @property
    def prompt_tokens(self) -> int:
        """The prompt to plan for: the 95th percentile."""
        return int(np.percentile(self.prompts, PERCENTILE, method="inverted_cdf"))

    @property
    def output_tokens(self) -> int:
        """The output to plan for: the 95th percentile."""
        return int(np.percentile(self.outputs, PERCENTILE, method="inverted_cdf"))

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return int((self.prompts + self.outputs).max())

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "requests": len(self.prompts),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "longest_tokens": self.longest_tokens,
            "skipped_requests": self.skipped_requests,
            "skipped_lines": self.skipped_lines,
        }


def given_lengths(prompt_tokens: int, max_tokens: int) -> Workload:
    """Requests that all have these lengths.

    Raises:
        RandKVConfigError: A length is no number of tokens.
    """
    check_integer("prompt_tokens", prompt_tokens, 1, MAX_COMPUTED_TOKENS)
    check_integer("max_tokens", max_tokens, 1, MAX_COMPUTED_TOKENS)
    return Workload("given", np.array([prompt_tokens]), np.array([max_tokens]))


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and {"time", "path", "status"} <= set(line) else None


def read_access_log(path: Path) -> Workload:
    """The answered generation requests of an access log, one JSON object a line.

    Other lines are skipped and counted: the server's standard output carries vLLM's log too.

    Raises:
        RandKVConfigError: The file cannot be read, has a length that is no number of tokens, or
            no answered request.

    Source: ``server.record.RequestRecord.log_line``.
    """
    prompts, outputs, unanswered, foreign = [], [], 0, 0
    field = f"access_log {str(path)!r}"
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, 1):
                line = _line(text)
                if line is None:
                    foreign += bool(text.strip())
                    continue
                if "outcome" not in line:
                    continue  # no generation: /v1/models and the like
                if line["outcome"] not in _ANSWERED:
                    unanswered += 1
                    continue
                found = [
                    check_integer(
                        f"{field}, line {number}: {name}", line.get(name), 0, MAX_COMPUTED_TOKENS
                    )
                    for name in _LENGTHS
                ]
                if 0 in found:
                    unanswered += 1
                    continue
                prompts.append(found[0])
                outputs.append(found[1])
    except OSError as error:
        raise RandKVConfigError(
            "access_log", str(path), f"a readable file ({error.strerror or error})"
        ) from None
    if not prompts:
        raise RandKVConfigError(
            "access_log",
            str(path),
            f"at least one answered generation request; {unanswered} were not answered, {foreign} "
            "lines are no access log's",
            "Save the server's standard output, one JSON object a line and without prefixes "
            "(docker compose logs --no-log-prefix).",
        )
    return Workload(
        str(path), np.array(prompts, np.int64), np.array(outputs, np.int64), unanswered, foreign
    )
