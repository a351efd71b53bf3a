# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark: what it stores, refuses and reports. The stored runs are real ones."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.serving import __main__ as command
from benchmarks.serving import figures, record
from benchmarks.serving.arms import parse_arm
from benchmarks.serving.monitor import INTERVAL, monitor
from benchmarks.serving.record import RefusedRunError
from benchmarks.serving.workloads import WORKLOADS
from tests.server.process import Server

STORED = Path(__file__).parents[1] / "data" / "serving"
EVICTED = "randkv_evicted_token_head_pairs_total"


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the stored runs; a change of the JSON of one of them."""

    def make(arm: str = "", change: Callable[[Any], None] | None = None) -> Path:
        for path in STORED.glob(f"*{record.SUFFIX}"):
            run = json.loads(gzip.decompress(path.read_bytes()))
            if change and run["settings"]["arm"] == arm and run["pair"] == 0:
                change(run)
            (tmp_path / path.name).write_bytes(gzip.compress(json.dumps(run).encode()))
        return tmp_path

    return make


def test_kept_schema_is_that_of_the_models() -> None:
    assert record.SCHEMA_FILE.read_text() == record.schema()


def test_stored_runs_are_valid_under_the_kept_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(record.SCHEMA_FILE.read_text()))
    paths = list(STORED.glob(f"*{record.SUFFIX}"))
    assert len(paths) == 6
    for path in paths:
        validator.validate(json.loads(gzip.decompress(path.read_bytes())))


def test_report_is_made_from_stored_runs_alone(
    stored: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = stored()
    assert command.main(["report", str(directory)]) == 0
    report = (directory / "report.md").read_text()
    assert report in capsys.readouterr().out
    runs = record.load(directory)
    for arm in ("dense", "randkv-128", "window-128"):
        (line,) = (line for line in report.splitlines() if line.startswith(f"| {arm} |"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        own = [run for run in runs if run.settings.arm == arm]
        assert cells[2] == str(len(own))
        speeds = sorted(figures.tokens_per_second(run) for run in own)
        assert float(cells[3]) == pytest.approx(sum(speeds) / 2, abs=0.06)
    for name in ("ratios.png", "memory.png"):
        assert (directory / name).read_bytes().startswith(b"\x89PNG")


def test_ratios_pair_runs_with_the_same_prompts() -> None:
    runs = record.load(STORED)
    row = next(
        row for row in figures.rows(figures.by_workload(runs)["memory-bound"]) if row.arm != "dense"
    )
    speeds = {(run.settings.arm, run.pair): figures.tokens_per_second(run) for run in runs}
    ratios = [speeds[row.arm, pair] / speeds["dense", pair] for pair in (0, 1)]
    assert row.ratio is not None
    assert row.ratio.value == pytest.approx(sum(ratios) / 2)
    assert row.ratio.num_values == 2


def test_run_without_an_evicted_pair_is_refused(
    stored: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def undo(run: Any) -> None:
        run["counters_after"][EVICTED] = run["counters_before"][EVICTED]

    assert command.main(["report", str(stored("randkv-128", undo))]) == 2
    error = capsys.readouterr().err
    assert "randkv-128, pair 0" in error
    assert "but the server counted 12 and 0 evicted pairs" in error


def test_dense_run_that_evicted_is_refused(stored: Callable[..., Path]) -> None:
    def evict(run: Any) -> None:
        run["counters_after"][EVICTED] += 90

    with pytest.raises(RefusedRunError, match="demand 0 rounds, but .* 0 and 90 evicted pairs"):
        record.load(stored("dense", evict))


def test_run_of_which_one_round_is_missing_is_refused(stored: Callable[..., Path]) -> None:
    def lose(run: Any) -> None:
        run["counters_after"]["randkv_compaction_rounds_total"] -= 1

    with pytest.raises(RefusedRunError, match="the policy did not run as it should"):
        record.load(stored("randkv-128", lose))


def test_run_that_shared_its_server_is_refused(stored: Callable[..., Path]) -> None:
    def share(run: Any) -> None:
        run["counters_after"]["vllm:generation_tokens_total"] += 7

    with pytest.raises(RefusedRunError, match="somebody else used the server"):
        record.load(stored("dense", share))


def test_runs_of_two_machines_are_no_comparison(stored: Callable[..., Path]) -> None:
    def move(run: Any) -> None:
        run["hardware"]["num_cores"] = 64

    with pytest.raises(RefusedRunError, match="different machines"):
        figures.by_workload(record.load(stored("dense", move)))


@pytest.mark.parametrize("field", ["output_len", "num_kv_blocks", "num_requests"])
def test_runs_of_other_settings_are_not_compared(stored: Callable[..., Path], field: str) -> None:
    def change(run: Any) -> None:
        run["settings"][field] = 4000

    runs = record.load(stored("dense", change))
    of_one_pair = [run for run in runs if run.pair == 0]
    for mixed in (runs, of_one_pair):
        with pytest.raises(RefusedRunError, match="different settings"):
            figures.by_workload(mixed)


def test_runs_of_one_pair_have_the_same_lengths(stored: Callable[..., Path]) -> None:
    def shorten(run: Any) -> None:
        run["requests"][0]["input_len"] -= 1

    with pytest.raises(RefusedRunError, match="different prompts or lengths"):
        figures.by_workload(record.load(stored("dense", shorten)))


def test_damaged_file_is_named(stored: Callable[..., Path], capsys: Any) -> None:
    path = next(stored().glob("*.gz"))
    path.write_bytes(path.read_bytes()[:-40])
    assert command.main(["report", str(path.parent)]) == 2
    assert f"{path}: expected a compressed file, whole" in capsys.readouterr().err


def test_samples_without_a_request_do_not_count(stored: Callable[..., Path]) -> None:
    def idle(run: Any) -> None:
        nothing = {"num_running": 0, "num_waiting": 0, "kv_usage": 0, "seconds": 0}
        run["samples"] = [nothing] * 20 + [
            {**nothing, "num_running": 2, "seconds": 20},
            {**nothing, "num_running": 4, "seconds": 21},
        ]

    runs = [
        run
        for run in record.load(stored("dense", idle))
        if run.settings.arm == "dense" and run.pair == 0
    ]
    (row,) = figures.rows(figures.by_workload(runs)["memory-bound"])
    assert (row.mean_running, row.most_running) == (3, 4)


def test_failed_sample_refuses_the_run() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        server = Server(cast(Any, None), nobody.getsockname()[1], Path())
        with pytest.raises(RefusedRunError, match="could not be sampled"), monitor(server):
            time.sleep(1.5 * INTERVAL)


def test_unknown_field_names_the_file(stored: Callable[..., Path]) -> None:
    def add(run: Any) -> None:
        run["settings"]["colour"] = "red"

    with pytest.raises(RefusedRunError, match=r"memory-bound\.dense\.000.*settings\.colour"):
        record.load(stored("dense", add))


def test_flat_latency_of_a_long_decode_is_a_ratio_of_one() -> None:
    run = next(run for run in record.load(STORED) if run.settings.arm == "dense")
    request = run.requests[0]
    flat = request.model_copy(update={"output_len": 3000, "itls": [0.02] * 2999})
    grown = flat.model_copy(update={"itls": [0.02] * 2799 + [0.05] * 200})
    assert figures.growth_of_itl([run]) is None
    for kept, ratio in ((flat, 1.0), (grown, 2.5)):
        growth = figures.growth_of_itl([run.model_copy(update={"requests": [kept]})])
        assert growth is not None
        assert growth.value == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arm", "randkv"], "expected dense, randkv-<budget> or window-<budget>"),
        (["--arm", "randkv-0"], "expected dense, randkv-<budget> or window-<budget>"),
        (["--arm", "randkv-32"], "expected a budget of at least 96"),
        (["--workload", "prefix-shared", "--num-requests", "3"], "an even --num-requests"),
        (["--workload", "prefix-shared", "--input-len", "96"], "expected --input-len above 96"),
    ],
)
def test_bad_arms_are_refused_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["run", "--workload", "memory-bound", "--output", str(tmp_path), *arguments]
    assert command.main(options) == 2
    assert said in capsys.readouterr().err


def test_every_workload_can_be_told_from_the_others_and_shortened() -> None:
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.quick().output_len < workload.output_len
        for arm in workload.arms:
            config = parse_arm(arm, 32).config
            assert config is None or config.budget >= workload.input_len


def test_rounds_are_due_from_the_length_that_the_engine_says() -> None:
    """Budget 128 and buffer 32: at 163 tokens, not at 162, and then every 32."""
    run = next(run for run in record.load(STORED) if run.settings.arm == "randkv-128")

    def num_due(length: int) -> int:
        request = run.requests[0].model_copy(update={"input_len": 60, "output_len": length - 60})
        return run.model_copy(update={"requests": [request]}).num_rounds_due

    assert [num_due(length) for length in (162, 163, 194, 195)] == [0, 1, 1, 2]


def run_small(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    small = ["--num-requests", "2", "--output-len", "150", "--num-kv-blocks", "40", "--pairs", "1"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.serving", "run", "--workload", "memory-bound"),
            *("--arm", "dense", "--arm", "randkv-96", "--output", str(output), *small),
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_servers_are_run_in_pairs_and_what_is_stored_is_not_run_again(tmp_path: Path) -> None:
    first = run_small(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "Next: read" in first.stdout
    runs = {run.settings.arm: run for run in record.load(tmp_path)}
    dense, randkv = runs["dense"], runs["randkv-96"]
    assert [r.input_len for r in dense.requests] == [r.input_len for r in randkv.requests]
    # 30 layers of 3 KV heads: rounds at 129, 161 and 193 computed tokens of about 214.
    assert randkv.grown(EVICTED) == 2 * 90 * (1 + 32 + 32)
    assert 0 < randkv.grown("randkv_copied_token_head_pairs_total") <= randkv.grown(EVICTED)
    assert dense.grown(EVICTED) == 0
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"*{record.SUFFIX}")}
    again = run_small(tmp_path)
    assert again.returncode == 0
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"*{record.SUFFIX}")}
    other = run_small(tmp_path, "--buffer-size", "16")
    assert other.returncode == 2
    assert "a run of other settings" in other.stderr
