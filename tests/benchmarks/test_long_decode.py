# SPDX-License-Identifier: Apache-2.0
"""The long decode with a small model: what is timed, stored and drawn, and what is refused."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks import long_decode
from benchmarks.decoder import BLOCK_SIZE
from benchmarks.engine_pair import REPOSITORY
from benchmarks.long_decode import Curve, Turn
from randkv.config import RandKVConfig
from tests.engine.models import make_tiny_model

CONFIG = RandKVConfig(96, 16)
LENGTHS = (600, 1000)


def test_growth_leaves_out_what_the_engines_differ_by() -> None:
    turns = {600: [Turn(0.04, 0.02), Turn(0.05, 0.05)], 6000: [Turn(0.06, 0.02), Turn(0.04, 0.04)]}
    assert Curve("dense", "dense", turns).growth(6000) == pytest.approx([2, 2 / 3])


def test_stored_turns_make_the_report_again_and_nothing_else_does(tmp_path: Path) -> None:
    (path,) = (REPOSITORY / "benchmarks" / "results" / "long-decode").glob("*.json")
    rows = long_decode.report(long_decode.read(path)).splitlines()
    assert rows[0] == "| output tokens | dense | KV blocks | randkv-256 | KV blocks |"
    assert [len(row.split("|")) for row in rows] == [7] * 8
    broken = tmp_path / "long-decode.json"
    for text, reason in (("[", "Invalid JSON"), ("{}", "and 2 more"), ('{"x": 1}', "ended_at")):
        broken.write_text(text)
        with pytest.raises(long_decode.WrongRunError, match=reason):
            long_decode.read(broken)


def test_a_long_decode_is_timed_by_length_and_refused_when_rounds_are_missing(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path)
    with long_decode.started(model, {"randkv-96": CONFIG}, LENGTHS[-1]) as arms:
        (arm,) = arms
        long_decode.measure(arms, LENGTHS)
        larger = RandKVConfig(128, 16)
        wrong = long_decode.Arm(Curve("larger", "?"), larger, arm.long, arm.reference)
        expected = "larger: 22 rounds at 400 output tokens, expected 20"
        with pytest.raises(long_decode.WrongRunError, match=expected):
            wrong.approach(600)
    curve = arm.curve
    for length in LENGTHS:
        assert len(curve.turns[length]) == long_decode.TURNS
        assert 0 < curve.blocks[length] <= -(-CONFIG.max_physical_len // BLOCK_SIZE)
    assert median(curve.growth(600)) == pytest.approx(1)
    stored = tmp_path / "long-decode.json"
    stored.write_text(long_decode.measured(arms).model_dump_json())
    curves = long_decode.read(stored)
    assert curves == [curve]
    rows = long_decode.report(curves).splitlines()
    assert rows[0] == "| output tokens | randkv-96 | KV blocks |"
    assert rows[-1].startswith("| 800 to 1,000 | ")
    assert rows[-1].endswith(f" | {curve.blocks[1000]} |")
    picture = tmp_path / "long-decode.png"
    long_decode.draw(curves, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
