# SPDX-License-Identifier: Apache-2.0
"""The long decode with a small model: what is timed, stored and drawn, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import long_decode
from benchmarks.decoder import BLOCK_SIZE
from benchmarks.long_decode import Curve, Turn
from randkv.config import RandKVConfig
from tests.engine.models import make_tiny_model

CONFIG = RandKVConfig(96, 16)
LENGTHS = (600, 1000)


def test_growth_leaves_out_what_the_engines_differ_by() -> None:
    turns = {600: [Turn(0.04, 0.02), Turn(0.05, 0.05)], 6000: [Turn(0.06, 0.02), Turn(0.04, 0.04)]}
    assert Curve("dense", "dense", turns).growth(6000) == pytest.approx([1.5, 1])


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
    assert curve.growth(600) == [1] * long_decode.TURNS
    curves = long_decode.curves_of(json.loads(json.dumps(long_decode.record([curve]))))
    assert curves == [curve]
    rows = long_decode.report(curves).splitlines()
    assert rows[0] == "| output tokens | randkv-96 | KV blocks |"
    assert rows[-1].startswith("| 800 to 1,000 | ")
    assert rows[-1].endswith(f" | {curve.blocks[1000]} |")
    picture = tmp_path / "long-decode.png"
    long_decode.draw(curves, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
