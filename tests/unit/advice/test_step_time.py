# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from randkv import RandKVConfigError
from randkv.advice.step_time import read_latency, roofline

GOOD: dict[str, Any] = {
    "fixed_seconds": 0.01,
    "seconds_per_kv_byte": 1e-12,
    "seconds_per_sequence": 0.001,
    "source": "nobody",
}


def latency(folder: Path, text: str) -> Path:
    path = folder / "latency.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_step_is_the_sum_of_its_three_parts(tmp_path: Path) -> None:
    step = read_latency(latency(tmp_path, json.dumps(GOOD)))
    assert step.tokens_per_second(10, 2e9) == pytest.approx(10 / (0.01 + 10 * (0.002 + 0.001)))
    assert (step.kind, step.source) == ("constants", "nobody")


def test_the_papers_step_gives_the_papers_throughput(tmp_path: Path) -> None:
    """9.5 ms + 0.415 ms per sequence, 128 of them, 2,046 tokens/s: arXiv 2609.03430."""
    paper = {"fixed_seconds": 9.5e-3, "seconds_per_kv_byte": 0, "seconds_per_sequence": 0.415e-3}
    step = read_latency(latency(tmp_path, json.dumps({**GOOD, **paper})))
    assert step.tokens_per_second(128, 0) == pytest.approx(2046, rel=0.002)


def test_the_roofline_reads_weights_and_kv_once() -> None:
    step = roofline(8e9, 4000)
    assert step.tokens_per_second(10, 1.6e9) == pytest.approx(10 / ((8e9 + 16e9) / 4e12))
    assert step.kind == "roofline"


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_that_is_none_is_refused(bandwidth: float) -> None:
    with pytest.raises(RandKVConfigError, match="memory_bandwidth has value"):
        roofline(1e9, bandwidth)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("latency", {"fixed_seconds": ...}),
        ("latency", {"source": ...}),
        ("latency", {"seconds_per_token": 1}),
        ("latency.source", {"source": " "}),
        ("latency.source", {"source": 1}),
        ("latency.fixed_seconds", {"fixed_seconds": 0}),
        ("latency.fixed_seconds", {"fixed_seconds": "1"}),
        ("latency.seconds_per_kv_byte", {"seconds_per_kv_byte": -1}),
        ("latency.seconds_per_sequence", {"seconds_per_sequence": 1e9}),
    ],
)
def test_a_bad_constant_is_named(tmp_path: Path, field: str, changes: dict[str, Any]) -> None:
    text = json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not ...})
    with pytest.raises(RandKVConfigError, match=f"^{field} has value"):
        read_latency(latency(tmp_path, text))


@pytest.mark.parametrize("text", ["", "[]", "3", '{"fixed_seconds": NaN}', "[" * 10_000])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RandKVConfigError, match="^latency has value"):
        read_latency(latency(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RandKVConfigError, match="^latency has value"):
        read_latency(tmp_path / "missing.json")
