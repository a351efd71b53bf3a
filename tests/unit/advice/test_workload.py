# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from randkv import RandKVConfigError
from randkv.advice.workload import given_lengths, read_access_log
from server.record import RequestRecord


def logged(prompt: int, output: int, reason: str = "stop", **changes: Any) -> str:
    """The line that the server writes for such a request."""
    record = RequestRecord(
        request_id="r",
        method="POST",
        path="/v1/chat/completions",
        is_generation=True,
        status=200,
        prompt_tokens=prompt,
        completion_tokens=output,
        finish_reasons={reason},
        is_answered=True,
    )
    for name, value in changes.items():
        setattr(record, name, value)
    return record.log_line()


def log(folder: Path, *lines: str) -> Path:
    path = folder / "access.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_given_lengths_are_one_request() -> None:
    work = given_lengths(100, 3000)
    assert (work.prompt_tokens, work.output_tokens, work.longest_tokens) == (100, 3000, 3100)
    assert not work.is_log


@pytest.mark.parametrize("field", ["prompt_tokens", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, True, "7"])
def test_a_length_that_is_none_is_named(field: str, value: Any) -> None:
    lengths = {"prompt_tokens": 1, "max_tokens": 1, field: value}
    with pytest.raises(RandKVConfigError, match=f"{field} has value"):
        given_lengths(**lengths)


def test_answered_requests_are_read_as_the_server_writes_them(tmp_path: Path) -> None:
    lines = [logged(100 + i, 1000 - i, "length" if i % 2 else "stop") for i in range(100)]
    work = read_access_log(log(tmp_path, *lines))
    assert work.prompts.tolist() == [100 + i for i in range(100)]
    assert work.outputs.tolist() == [1000 - i for i in range(100)]
    assert (work.prompt_tokens, work.output_tokens, work.longest_tokens) == (194, 995, 1100)
    assert work.is_log
    assert (work.skipped_requests, work.skipped_lines) == (0, 0)


def test_other_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    work = read_access_log(
        log(
            tmp_path,
            "INFO 11-30 vLLM is starting",
            '{"a": 1}',
            "[1]",
            "[" * 10_000,
            "",
            logged(0, 0, path="/v1/models", method="GET", is_generation=False),
            logged(5, 3, is_answered=False),
            logged(5, 0, was_refused=True),
            logged(5, 3, had_error=True),
            logged(5, 3, "abort"),
            logged(5, 0),
            logged(7, 9),
        )
    )
    assert (work.prompts.tolist(), work.outputs.tolist()) == ([7], [9])
    assert (work.skipped_requests, work.skipped_lines) == (5, 4)


@pytest.mark.parametrize("value", ["7", None, -1, 1.5, True])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
def test_a_length_that_is_none_is_named_with_its_line(
    tmp_path: Path, field: str, value: Any
) -> None:
    broken = json.dumps({**json.loads(logged(7, 9)), field: value})
    with pytest.raises(RandKVConfigError, match=f"line 2: {field} has value"):
        read_access_log(log(tmp_path, logged(7, 9), broken))


def test_a_log_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RandKVConfigError, match="1 were not answered, 2 lines are no access log"):
        read_access_log(log(tmp_path, "web-1 | {}", logged(5, 3, "abort"), "x"))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_log_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RandKVConfigError, match="access_log has value"):
        read_access_log(tmp_path / name)
