# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from randkv import RandKVConfig, RandKVConfigError, retention
from randkv.__main__ import main
from randkv.planner import first_due, replay
from randkv.retention import (
    MAX_COMPUTED_TOKENS,
    MAX_KV_HEADS,
    MAX_LAYERS,
    RetentionMap,
    retention_map,
)
from randkv.retention_picture import to_svg

KV_HEADS = 3


@st.composite
def cases(draw: st.DrawFn) -> RetentionMap:
    """A map of a few rounds that ends on a due round, just after it, or between two."""
    budget = draw(st.integers(1, 40))
    config = RandKVConfig(budget, draw(st.integers(0, 12)), draw(st.integers(0, 2**64 - 1)))
    prompt_tokens = draw(st.integers(1, budget))
    at_round = first_due(config) + draw(st.integers(-1, 6)) * config.round_interval
    return retention_map(
        config,
        request_key=draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)),
        prompt_tokens=prompt_tokens,
        computed_tokens=max(prompt_tokens, at_round + draw(st.integers(-1, 1))),
        layer=draw(st.integers(0, 3)),
        num_kv_heads=KV_HEADS,
    )


@given(cases())
def test_agrees_with_replay_up_to_the_round_that_has_not_run(found: RetentionMap) -> None:
    rounds = replay(
        found.config,
        request_key=found.request_key,
        prompt_len=found.prompt_tokens,
        num_tokens=found.computed_tokens - 1,
        num_layers=found.layer + 1,
        num_kv_heads=KV_HEADS,
    )
    expected = np.ones((KV_HEADS, found.computed_tokens), bool)
    for done in rounds:
        for head, positions in enumerate(done.evicted_positions[found.layer]):
            expected[head, positions] = False
    assert found.rounds == len(rounds)
    assert found.kept.tolist() == expected.tolist()


@given(cases())
def test_prompt_and_newest_are_kept_and_all_heads_hold_as_many(found: RetentionMap) -> None:
    config = found.config
    assert found.kept[:, : found.prompt_tokens].all()
    assert found.kept[:, found.newest_from :].all()
    assert found.prompt_tokens <= found.newest_from
    assert found.computed_tokens - found.newest_from <= config.buffer_size
    assert found.kept.sum(axis=1).tolist() == [found.physical_tokens] * KV_HEADS
    assert found.physical_tokens <= config.max_physical_len
    evicted = 0 if found.rounds == 0 else 1 + (found.rounds - 1) * config.round_interval
    assert found.evicted_tokens == evicted


@given(cases())
def test_ranges_say_the_same_as_the_map(found: RetentionMap) -> None:
    shown = json.loads(json.dumps(found.to_dict()))
    kept = np.zeros_like(found.kept)
    for head, ranges in enumerate(shown.pop("kept")):
        for (start, stop), (after, _) in zip(ranges, [*ranges[1:], (2**31, 0)], strict=True):
            assert start < stop < after
            kept[head, start:stop] = True
    assert kept.tolist() == found.kept.tolist()
    assert shown == {
        "request_key": found.request_key,
        "policy": found.config.to_dict(),
        "layer": found.layer,
        "num_kv_heads": KV_HEADS,
        "prompt_tokens": found.prompt_tokens,
        "computed_tokens": found.computed_tokens,
        "physical_tokens": found.physical_tokens,
        "evicted_tokens": found.evicted_tokens,
        "rounds": found.rounds,
        "newest_from": found.newest_from,
    }


SMALL = RandKVConfig(64, 16)


def small(config: RandKVConfig = SMALL, **changes: Any) -> RetentionMap:
    arguments = {
        "request_key": "chat-42",
        "prompt_tokens": 20,
        "computed_tokens": 300,
        "layer": 0,
        "num_kv_heads": 8,
    }
    return retention_map(config, **{**arguments, **changes})


def test_a_round_runs_before_the_token_after_it() -> None:
    due = first_due(SMALL)
    assert small(computed_tokens=due).rounds == 0
    assert small(computed_tokens=due + 1).rounds == 1


def test_heads_and_layers_differ_but_do_not_depend_on_how_many_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = small().kept
    assert len({row.tobytes() for row in whole}) == 8
    assert (small(num_kv_heads=3).kept == whole[:3]).all()
    assert (small(layer=1).kept != whole).any()
    monkeypatch.setattr(retention, "_SLOTS_AT_ONCE", 300)
    grouped = small()
    assert (grouped.kept == whole).all()
    assert grouped.rounds == small().rounds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_key", ""),
        ("request_key", "k" * 513),
        ("request_key", "\ud800"),
        ("request_key", 7),
        ("prompt_tokens", 0),
        ("prompt_tokens", 65),
        ("prompt_tokens", True),
        ("computed_tokens", 19),
        ("computed_tokens", MAX_COMPUTED_TOKENS + 1),
        ("computed_tokens", 300.0),
        ("layer", -1),
        ("layer", MAX_LAYERS),
        ("num_kv_heads", 0),
        ("num_kv_heads", MAX_KV_HEADS + 1),
    ],
)
def test_an_argument_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(RandKVConfigError) as caught:
        small(**{field: value})
    assert caught.value.field == field
    assert caught.value.value == value


def test_the_last_arguments_in_range_are_accepted() -> None:
    assert small(prompt_tokens=64, computed_tokens=64, request_key="é" * 512).rounds == 0
    assert small(layer=MAX_LAYERS - 1, num_kv_heads=MAX_KV_HEADS).kept.shape == (1024, 300)
    assert small(RandKVConfig(2**31 - 1), computed_tokens=2**20).physical_tokens == 2**20


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [(RandKVConfig(64, 0), 1), (RandKVConfig(2048, 64), 8), (RandKVConfig(2**20, 64), 1024)],
    ids=["many rounds", "long rounds", "large map"],
)
def test_too_much_work_is_refused_with_the_limit(config: RandKVConfig, kv_heads: int) -> None:
    with pytest.raises(RandKVConfigError, match=r"at most \d+.*fewer tokens or KV heads") as caught:
        small(config, computed_tokens=2**20, num_kv_heads=kv_heads)
    assert caught.value.field == "computed_tokens"


def test_the_limit_that_the_refusal_names_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_WORK", 150_000)
    with pytest.raises(RandKVConfigError, match=r"at most \d+") as caught:
        small(computed_tokens=5000)
    limit = int(caught.value.expected.split()[2].strip(","))
    assert small(computed_tokens=limit).rounds == 150_000 // (8 * 96 + retention._ROUND_COST)
    with pytest.raises(RandKVConfigError):
        small(computed_tokens=limit + 1)


ARGUMENTS = [
    "retention",
    "--request-key",
    "chat-42",
    "--prompt-tokens",
    "20",
    "--computed-tokens",
    "300",
]
POLICY = ["--budget", "64", "--buffer-size", "16"]


def test_command_writes_json_by_default(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    options = ["--seed", "5", "--layer", "2", "--kv-heads", "3"]
    assert main([*ARGUMENTS, *POLICY, *options]) == 0
    expected = small(RandKVConfig(64, 16, 5), layer=2, num_kv_heads=3)
    assert json.loads(capsysbinary.readouterr().out) == expected.to_dict()


def test_command_defaults_to_the_default_policy(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(ARGUMENTS) == 0
    assert json.loads(capsysbinary.readouterr().out) == small(RandKVConfig()).to_dict()


def test_command_writes_pictures_to_standard_output(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert main([*ARGUMENTS, *POLICY, "--format", "svg"]) == 0
    assert capsysbinary.readouterr().out.decode() == to_svg(small())
    assert main([*ARGUMENTS, *POLICY, "--format", "png"]) == 0
    assert Image.open(io.BytesIO(capsysbinary.readouterr().out)).format == "PNG"


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [
        ("map.json", [], b'{"request_key": "chat-42"'),
        ("map.svg", [], b"<svg "),
        ("map.PNG", [], b"\x89PNG"),
        ("map.json", ["--format", "svg"], b"<svg "),
        ("map", ["--format", "png"], b"\x89PNG"),
    ],
)
def test_command_takes_the_format_from_the_option_or_the_suffix(
    name: str, options: list[str], start: bytes, tmp_path: Path
) -> None:
    output = tmp_path / name
    assert main([*ARGUMENTS, *POLICY, *options, "--output", str(output)]) == 0
    assert output.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--budget", "19"], "prompt_tokens has value 20"),
        (["--budget", "0"], "kv_cache_policy.budget has value 0"),
        (["--budget", "1k"], "argument --budget: invalid int value: '1k'"),
        (["--format", "gif"], "argument --format"),
        (["--output", "map.jpg"], "'map.jpg' has no suffix .json, .svg or .png"),
        (["--output", "/nowhere/map.svg"], "/nowhere/map.svg"),
        (["--request-key", "\udcff"], "request_key has value '\\udcff'"),
    ],
)
def test_command_refuses_in_one_line(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main([*ARGUMENTS, *options])
    except SystemExit as left:
        code = left.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert text in output.err


def test_command_keeps_a_png_off_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main([*ARGUMENTS, "--format", "png"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.endswith("Give --output FILE.\n")
