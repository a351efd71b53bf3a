# SPDX-License-Identifier: Apache-2.0
"""The long decode with a small model: what is stored and drawn, and what is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import long_decode
from benchmarks.decoder import BLOCK_SIZE, PROMPT_LEN
from benchmarks.engine_pair import Worker
from randkv.config import RandKVConfig
from tests.engine.models import make_tiny_model

CONFIG = RandKVConfig(96, 16)
LENGTHS = (600, 1000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_steps_are_timed_by_length_and_blocks_stay_bounded(model: Path, tmp_path: Path) -> None:
    arms = long_decode.run(model, CONFIG, LENGTHS)
    dense, policy = arms
    assert [arm.name for arm in arms] == ["dense", "randkv-96"]
    for length in LENGTHS:
        assert len(dense.turns[length]) == len(policy.turns[length]) == long_decode.TURNS
        assert dense.blocks[length] == -(-(PROMPT_LEN + length - 1) // BLOCK_SIZE)
        assert policy.blocks[length] <= -(-CONFIG.max_physical_len // BLOCK_SIZE)
    for arm in arms:  # the long request is where the reference is: nothing to tell them apart
        assert 0.7 < long_decode.ratios(arm, 600)[0] < 1.4
    stored = json.loads(json.dumps(long_decode.record(arms)))
    turns = stored["arms"]["randkv-96"]["turns"]["1000"]
    assert [long / reference for long, reference in turns] == long_decode.ratios(policy, 1000)
    assert stored["arms"]["randkv-96"]["kv_cache_policy"] == CONFIG.to_dict()
    rows = long_decode.report(arms, LENGTHS).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    assert rows[-1].startswith("| 800 to 1,000 |")
    assert f"| {dense.blocks[1000]} |" in rows[-1]
    picture = tmp_path / "long-decode.png"
    long_decode.draw(arms, LENGTHS, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_other_rounds_than_the_length_demands_are_no_result(model: Path) -> None:
    policy = json.dumps(CONFIG.to_dict())
    with closing(Worker("benchmarks.decoder", str(model), policy, "700")) as worker:
        arm = long_decode.Arm("another budget", RandKVConfig(128, 16), worker, worker)
        with pytest.raises(
            long_decode.WrongRunError,
            match="another budget: 22 rounds at 400 output tokens, expected 20",
        ):
            arm.approach(600)
