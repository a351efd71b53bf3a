# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark around its engine: what it refuses, keeps, scores and reports."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from scipy import stats

from benchmarks.quality import comparison
from benchmarks.quality.__main__ import main
from benchmarks.quality.arm import DENSE, Arm, arms
from benchmarks.quality.item import Item
from benchmarks.quality.plan import make_plan, requests
from benchmarks.quality.plot import picture
from benchmarks.quality.record import SCHEMA, Record, schema_text
from benchmarks.quality.repetition import repeated_share
from benchmarks.quality.report import report
from benchmarks.quality.retrieval import is_right, nll, retrieval_items
from benchmarks.quality.store import Store, StoreError
from benchmarks.quality.text import NotEnoughTextError, topics, windows
from randkv.planner import replay
from tests.benchmarks.quality_runs import RANDKV, SETTINGS, WINDOW, complete_run, record


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A directory with a complete run."""
    store = Store(tmp_path / "run")
    store.begin(SETTINGS)
    for one in complete_run():
        store.append(one)
    return store


# Evictions


@pytest.mark.parametrize(("budget", "buffer_size"), [(16, 4), (16, 0), (16, 1), (9, 7)])
@pytest.mark.parametrize("output_len", [1, 2, 9, 13, 14, 15, 18, 19, 60])
def test_evictions_are_those_of_the_planner(budget: int, buffer_size: int, output_len: int) -> None:
    arm = Arm(kind="randkv", budget=budget, buffer_size=buffer_size)
    rounds = replay(
        arm.config,
        request_key="r",
        prompt_len=8,
        num_tokens=8 + output_len - 2,  # the last is never computed, and no round follows
        num_layers=1,
        num_kv_heads=1,
    )
    evicted = [done.evicted_positions.shape[2] for done in rounds]
    assert arm.evictions(8, output_len) == (len(evicted), sum(evicted))


def test_first_affected_token_is_predicted_by_the_first_computed_after_a_round() -> None:
    # Round at C = 21: token 21 does not see what it evicted, and predicts token 22.
    assert 8 + RANDKV.first_affected(8) == 22
    assert not RANDKV.evicts(8, 22 - 8)
    assert RANDKV.evicts(8, 23 - 8)


@pytest.mark.parametrize("changes", [{"rounds": 0, "evicted_tokens": 0}, {"evicted_tokens": 16}])
def test_arm_that_did_not_evict_as_it_should_is_no_result(changes: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="the engine reports .* this is no result"):
        record(RANDKV, **changes)


def test_dense_that_evicted_is_no_result() -> None:
    with pytest.raises(ValidationError, match="expected 0 and 0"):
        record(DENSE, rounds=5, evicted_tokens=17)


def test_stored_line_without_evictions_is_refused(store: Store) -> None:
    path = store.directory / "records.jsonl"
    lines = path.read_text().splitlines()
    late = next(i for i, line in enumerate(lines) if '"randkv"' in line)
    changed = json.loads(lines[late]) | {"rounds": 0, "evicted_tokens": 0}
    lines[late] = json.dumps(changed)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(StoreError, match=rf"line {late + 1}: .*reports 0 rounds"):
        store.records()
    with pytest.raises(SystemExit) as ended:
        main(["--report-only", str(store.directory)])
    assert ended.value.code == 1


def test_record_without_a_measurement_per_token_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"\(32, 31, 32\) tokens, logprobs and top_tokens"):
        record(DENSE, logprobs=[-1.0] * 31)


# Schema, and the directory


def test_schema_in_the_repository_is_that_of_the_code() -> None:
    assert SCHEMA.read_text() == schema_text()


def test_written_lines_fit_the_schema(store: Store) -> None:
    schema = json.loads(SCHEMA.read_text())
    for name, lines in (
        ("Record", (store.directory / "records.jsonl").read_text().splitlines()),
        ("Settings", [(store.directory / "settings.json").read_text()]),
    ):
        validator = Draft202012Validator({**schema, "$ref": f"#/$defs/{name}"})
        for line in lines:
            validator.validate(json.loads(line))
        assert not validator.is_valid({**json.loads(lines[0]), "version": 2})
        assert not validator.is_valid({**json.loads(lines[0]), "other": 1})


def test_records_come_back_as_written(store: Store) -> None:
    assert store.records() == complete_run()


def test_same_settings_go_on_and_a_cut_line_is_dropped(store: Store) -> None:
    path = store.directory / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert store.records() == complete_run()[:-1]
    store.begin(SETTINGS)
    store.append(complete_run()[-1])
    assert path.read_bytes() == whole


def test_other_settings_are_refused_by_name(store: Store) -> None:
    other = SETTINGS.model_copy(update={"seed": 1, "budgets": (16, 32)})
    with pytest.raises(
        StoreError, match=r"budgets is \(16,\) there and \(16, 32\) here; seed is 0"
    ):
        store.begin(other)


def test_settings_that_an_older_run_did_not_record_are_not_compared(store: Store) -> None:
    for name, other in (("patch", "q"), ("concurrency", 9)):
        with pytest.raises(StoreError, match=f"other settings: {name} is"):
            store.begin(SETTINGS.model_copy(update={name: other}))
    path = store.directory / "settings.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in stored.items() if k not in UNRECORDED}))
    assert store.settings() == SETTINGS.model_copy(update=dict.fromkeys(UNRECORDED))
    store.begin(SETTINGS)
    assert main(["--report-only", str(store.directory)]) == 0
    with pytest.raises(StoreError, match="other settings: seed is 0 there and 1 here"):
        store.begin(SETTINGS.model_copy(update={"seed": 1}))


UNRECORDED = ("patch", "concurrency")


def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match="not empty and holds no settings.json"):
        Store(tmp_path).begin(SETTINGS)


def test_same_record_twice_is_refused(store: Store) -> None:
    store.append(complete_run()[0])
    with pytest.raises(StoreError, match="line 25: .* is there twice"):
        store.records()


# Items


def test_fact_is_as_far_from_the_question_in_the_prompt_as_in_generated_text() -> None:
    fillers = [encode("x" * 400), encode("y" * 500)]
    items = retrieval_items(encode, fillers, num_keys=3, distances=(5, 400), seed=1)
    assert len(items) == 3 * 2 * 2
    for stated, generated in zip(items[::2], items[1::2], strict=True):
        assert stated.prompt + stated.forced == generated.prompt + generated.forced
        assert (stated.task, generated.task) == ("prompt-fact", "generated-fact")
        assert (stated.name, stated.distance) == (generated.name, generated.distance)
        digits = bytes(stated.forced[stated.first_scored :])
        assert digits == bytes(generated.forced[generated.first_scored :])
        assert digits.isdigit()
        whole = bytes(stated.prompt + stated.forced)
        fact = b"The pass key is " + digits + b". Remember it.\n\n"
        assert bytes(stated.prompt).endswith(fact)
        assert bytes(generated.forced).startswith(fact)
        filler = b"y" if stated.name == "key-01" else b"x"
        question = b"\n\nWhat is the pass key? The pass key is "
        assert whole.endswith(fact + filler * stated.distance + question + digits)
        assert whole.count(digits) == 2
    assert len({items[i].forced[-5:] for i in (0, 4, 8)}) == 3


def test_filler_shorter_than_a_distance_and_joined_digits_are_refused() -> None:
    with pytest.raises(ValueError, match="distance 9 is longer than the filler, 8 tokens"):
        retrieval_items(encode, [encode("x" * 8)], 1, (4, 9), 0)
    with pytest.raises(ValueError, match="is 1 tokens of this model: expected 5"):
        retrieval_items(lambda text: [len(text)], [encode("x" * 8)], 1, (4,), 0)


def test_right_answer_has_every_digit_on_top() -> None:
    right = record(DENSE, task="prompt-fact", first_scored=27, logprobs=[-1, -2, -3, 0, 0])
    assert is_right(right)
    assert nll(right) == pytest.approx(6 / 5)
    assert not is_right(right.model_copy(update={"top_tokens": [0, 1, 2, 3, 9]}))


def test_repeated_share_counts_what_occurred_before() -> None:
    assert repeated_share([1, 2, 3, 4, 5], 4) == 0
    assert repeated_share([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)
    assert repeated_share([7] * 13, 4) == pytest.approx(9 / 10)
    # Ends from index 5 on: (1, 2) was there before, (2, 5) and (5, 6) were not.
    assert repeated_share([1, 2, 3, 4, 1, 2, 5, 6], 2, first=5) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="5 tokens hold no 4-gram that ends at 5 or later"):
        repeated_share([1, 2, 3, 4, 5], 4, first=5)
    with pytest.raises(ValueError, match="3 tokens hold no 4-gram"):
        repeated_share([1, 2, 3], 4)


def test_windows_are_the_first_of_texts_long_enough() -> None:
    texts = {"short": "abc", "long": "abcdef", "longer": "ghijklm", "last": "nopqrs"}
    assert windows(texts, encode, 2, 5) == {"long": encode("abcde"), "longer": encode("ghijk")}
    with pytest.raises(NotEnoughTextError, match="3 of 4 texts have 5 tokens or more, and 4 are"):
        windows(texts, encode, 4, 5)


def test_python_has_its_reference_in_order() -> None:
    found = topics()
    assert list(found) == sorted(found)
    assert "Assert statements" in found["assert"]


def test_arm_runs_only_items_it_evicts_from() -> None:
    items = [Item("text", name, 0, (1,) * 8, (2,) * n) for name, n in (("a", 14), ("b", 15))]
    chosen = requests([DENSE, RANDKV, WINDOW], items)
    assert [(r.arm.kind, r.item.name) for r in chosen] == [
        ("dense", "a"),
        ("dense", "b"),
        ("randkv", "b"),
        ("window", "b"),
    ]


def test_arm_that_never_evicts_and_a_prompt_over_budget_are_refused() -> None:
    item = Item("text", "a", 0, (1,) * 8, (2,) * 30)
    with pytest.raises(ValueError, match="randkv K=64 r=32 evicts from no item: .* 38 tokens"):
        requests(arms([64], [32], has_window=False), [item])
    with pytest.raises(ValueError, match="randkv K=7 r=4 does not hold the 8 prompt tokens"):
        requests(arms([7], [4], has_window=False), [item])


def test_plan_names_everything_that_results_depend_on(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    text = tmp_path / "text.txt"
    text.write_text("a" * 100 + "b" * 100)
    options = Namespace(model=tmp_path, text=[text], budgets=(160,), buffers=(4,), window=True)
    vars(options).update(num_texts=1, prompt_len=8, text_len=190, num_keys=1, distances=(150,))
    vars(options).update(num_free=1, free_len=180, temperature=0.5, seed=3, concurrency=5)
    plan = make_plan(options, encode, "vllm 0", "patch")
    assert (plan.settings.engine, plan.settings.patch) == ("vllm 0", "patch")
    assert (plan.settings.seed, plan.settings.concurrency) == (3, 5)
    assert plan.settings.num_records == len(plan.requests) == 3 * 4
    assert len({request.key for request in plan.requests}) == 12
    assert plan.longest == max(r.item.total_len for r in plan.requests)
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    again = make_plan(options, encode, "vllm 0", "patch").settings
    assert again.model_sha256 != plan.settings.model_sha256
    assert again.model_copy(update={"model_sha256": plan.settings.model_sha256}) == plan.settings
    text.write_text("c" * 200)
    other_text = make_plan(options, encode, "vllm 0", "patch").settings
    assert other_text.text_sha256 != again.text_sha256
    with pytest.raises(ValueError, match="--text-len is 8: expected more than --prompt-len"):
        make_plan(Namespace(**{**vars(options), "text_len": 8}), encode, "vllm 0", "patch")


# Comparison and report


def test_text_rows_are_over_tokens_after_the_first_eviction() -> None:
    randkv, window = comparison.text_rows(complete_run())
    assert (randkv.arm, window.arm) == (RANDKV, WINDOW)
    assert randkv.num_tokens == 2 * (40 - 22)
    assert randkv.nll_difference.value == pytest.approx(0.55)
    assert randkv.nll_difference.num_values == 2
    assert randkv.dense_nll.value == pytest.approx(1.0)
    assert randkv.agreement.value == pytest.approx(0.5)
    assert window.nll_difference.value == pytest.approx(0.8)


def test_window_difference_is_paired_by_text() -> None:
    ((arm, figure),) = comparison.window_differences(complete_run())
    assert arm == RANDKV
    assert figure.value == pytest.approx(-0.25)
    assert (figure.low, figure.high) == pytest.approx((-0.25, -0.25))


def test_bands_share_out_the_same_tokens() -> None:
    rows = [
        row for row in comparison.band_rows(complete_run(), (0, 20, 24, 64)) if row.arm == RANDKV
    ]
    assert [(row.low, row.high, row.num_tokens) for row in rows] == [(20, 24, 4), (24, 64, 32)]


def test_early_difference_is_that_before_the_first_eviction() -> None:
    run = complete_run()
    assert comparison.largest_early_difference(run) == 0
    index = next(i for i, r in enumerate(run) if r.arm == RANDKV and r.task == "text")
    place = RANDKV.first_affected(8) - 1
    logprobs = list(run[index].logprobs)
    logprobs[place] -= 0.25
    run[index] = run[index].model_copy(update={"logprobs": logprobs})
    assert comparison.largest_early_difference(run) == pytest.approx(0.25)
    assert "differ from dense by at most 2e-01." in report(SETTINGS, run)


def test_early_difference_is_left_out_without_a_comparison() -> None:
    run = [r for r in complete_run() if r.task != "text"]
    assert comparison.largest_early_difference(run) is None
    assert "first eviction its log-probabilities" not in report(SETTINGS, run)


def test_fact_and_repetition_rows_are_paired_with_dense() -> None:
    run = complete_run()
    right, digits = comparison.fact_rows(run, "generated-fact")[0]
    assert (right.value.value, right.dense.value, right.difference.value) == (0.5, 1.0, -0.5)
    assert digits.difference.value == 0
    assert comparison.fact_rows(run, "prompt-fact")[0][0].difference.value == 0
    repetition = comparison.repetition_rows(run)[0]
    assert repetition.dense.value == 0
    # The first affected token has index 14: of 18 4-grams that end from there on, two are sevens.
    assert repetition.value.value == pytest.approx(2 / 18)
    assert repetition.num_affected == 2 * 18


def test_repetition_of_dense_is_counted_where_the_arm_differs() -> None:
    run = [
        r.model_copy(update={"tokens": [*([7] * 15), *range(17)]})
        if r.arm.is_dense and r.task == "free"
        else r
        for r in complete_run()
    ]
    assert comparison.repetition_rows(run)[0].dense.value == pytest.approx(1 / 18)


@pytest.mark.parametrize("num_right", [0, 5, 16])
def test_share_of_right_answers_has_wilsons_interval(num_right: int) -> None:
    run = [
        fact(arm, f"{key:02}", 32, [0, 1, 2, 3, 4 if arm.is_dense or key < num_right else 9])
        for arm in (DENSE, RANDKV)
        for key in range(16)
    ]
    ((right, _),) = comparison.fact_rows(run, "generated-fact")
    for figure, number in ((right.value, num_right), (right.dense, 16)):
        expected = stats.binomtest(number, 16).proportion_ci(method="wilson")
        assert figure.value == number / 16
        assert figure[1:3] == pytest.approx((expected.low, expected.high))
        assert 0 <= figure.low <= figure.value <= figure.high <= 1
    assert right.difference.value == num_right / 16 - 1


def fact(arm: Arm, name: str, output_len: int, top_tokens: list[int]) -> Record:
    """A fact in generated text; `output_len` is the distance, too."""
    fields = {"name": name, "distance": output_len, "output_len": output_len}
    fields |= {"first_scored": output_len - 5, "top_tokens": top_tokens}
    return record(arm, task="generated-fact", **fields)


def test_rows_next_to_dense_are_marked_and_not_drawn() -> None:
    tops = [0, 1, 2, 3, 4]
    run = [fact(arm, "a", length, tops) for arm in (DENSE, RANDKV) for length in (15, 32)]
    rows = [right for right, _ in comparison.fact_rows(run, "generated-fact")]
    assert [(r.evicted, comparison.is_nearly_dense(r)) for r in rows] == [(1, True), (17, False)]
    assert [r.num_affected for r in rows] == [1, 5]
    text = report(SETTINGS, run)
    assert "| generated text | 15 | randkv K=16 r=4 | 1 † | 1 | 100 % (21 to 100)" in text
    assert "| generated text | 32 | randkv K=16 r=4 | 17 | 1 | 100 % (21 to 100)" in text
    assert "†: fewer than the arm's buffer `r`." in text
    (drawn,) = picture(SETTINGS, run).axes[2].containers
    assert drawn.get_label() == "generated, 32 tokens ago"


def test_values_over_budgets_are_not_joined() -> None:
    panels = picture(SETTINGS, complete_run()).axes
    styles = [{drawn.lines[0].get_linestyle() for drawn in axes.containers} for axes in panels]
    assert styles == [{"None"}, {"None"}, {"None"}, {"None"}]


def test_record_without_its_dense_partner_is_left_out() -> None:
    run = [r for r in complete_run() if not (r.arm.is_dense and r.name == "b")]
    assert comparison.text_rows(run)[0].nll_difference.num_values == 1


def test_report_is_made_from_the_stored_lines_alone(store: Store) -> None:
    for _ in range(2):
        command = [sys.executable, "-c", WITHOUT_ENGINE, "--report-only", str(store.directory)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
        text = (store.directory / "report.md").read_text()
        assert text == report(SETTINGS, complete_run())
        picture = (store.directory / "quality.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        (store.directory / "report.md").unlink()
    assert (
        "| randkv K=16 r=4 | 17 | 36 | 2 | 1.000 | 1.550 | +0.550 (+0.500 to +0.600) | 0.500"
        in text
    )
    assert (
        "| generated text | 16 | randkv K=16 r=4 | 17 | 2 | 100 % (34 to 100) | 50 % (9 to 91) "
        "| -50 (-100 to +0) |" in text
    )
    assert "| randkv K=16 r=4 | 17 | 36 | 2 | 0.000 (0.000 to 0.000) | 0.111 (0.111 to" in text
    assert "Incomplete" not in text


WITHOUT_ENGINE = """
import sys
sys.modules["vllm"] = sys.modules["torch"] = None
from benchmarks.quality.__main__ import main
raise SystemExit(main())
"""


def test_incomplete_run_says_so() -> None:
    assert "**Incomplete: 4 records are missing" in report(SETTINGS, complete_run()[:-4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "0"], "argument --budgets: '0': expected a whole number from 1"),
        (["--buffers", "x"], "argument --buffers: 'x': expected a whole number from 0"),
        (["--temperature", "3"], "'3': expected a temperature from 0 to 2"),
        (["--model", "/nowhere"], "--model /nowhere: expected a folder with a tokenizer.json"),
        (["--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (["--budgets", "4096"], "randkv K=4096 r=32 evicts from no item: the longest has 320"),
        (["--budgets", "20"], "randkv K=20 r=32 does not hold the"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--quick", "--output", str(tmp_path / "run"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--report-only", str(tmp_path)])
    assert ended.value.code == 1
    assert "holds no run" in capsys.readouterr().err


def test_output_that_is_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SystemExit) as ended:
            main(["--quick", "--output", str(output)])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            f"python -m benchmarks.quality: error: [Errno 20] Not a directory: '{output}'"
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
@pytest.mark.parametrize("name", ["report.md", "quality.png"])
def test_full_disk_is_one_line(store: Store, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (store.directory / name).symlink_to("/dev/full")
    with pytest.raises(SystemExit) as ended:
        main(["--report-only", str(store.directory)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "python -m benchmarks.quality: error: [Errno 28] No space left on device"


def test_schema_refuses_what_the_record_refuses() -> None:
    with pytest.raises(ValidationError, match="extra"):
        Record.model_validate({**record(DENSE).model_dump(), "note": "x"})
