# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shlex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from randkv import RandKVConfig, RandKVConfigError
from randkv.advice.advisor import Option, Plan, ages, compare, default_budgets, dense, option
from randkv.advice.model_shape import ModelShape
from randkv.advice.recommendation import notes, recommend
from randkv.advice.report import Advice, to_text
from randkv.advice.step_time import StepTime, roofline
from randkv.advice.workload import Workload, given_lengths
from randkv.config import EnginePolicy
from tests.unit.advice.cases import plan


def option_of(of: Plan, budget: int, buffer_size: int = 64) -> Option:
    return option(of, dense(of), RandKVConfig(budget, buffer_size))


@pytest.mark.parametrize(
    ("lengths", "budgets"),
    [
        ((100, 3000), [128, 256, 512, 1024, 2048]),
        ((128, 3000), [128, 256, 512, 1024, 2048]),
        ((129, 895), [256, 512]),
        ((129, 896), [256, 512, 1024]),
        ((1025, 10), [2048]),
        ((1, 1), [1]),
    ],
)
def test_budgets_are_powers_of_two_from_the_prompt_to_the_dense_length(
    lengths: tuple[int, int], budgets: list[int]
) -> None:
    assert default_budgets(given_lengths(*lengths)) == budgets


@pytest.mark.parametrize(
    ("output", "expected"),
    [(1, []), (2, [1]), (5, [1, 4]), (1000, [32, 128, 512]), (32768, [1024, 4096, 16384])],
)
def test_ages_are_those_that_a_token_can_reach(output: int, expected: list[int]) -> None:
    assert ages(output) == expected


def test_requests_are_whole_blocks_and_whole_requests() -> None:
    of = plan(num_blocks=1000)
    held = option_of(of, 512).held
    assert (held.tokens, held.blocks) == (640, 40)
    assert held.kv_bytes == 640 * 4
    assert held.requests == 25
    assert option_of(plan(num_blocks=999), 512).held.requests == 24
    assert option_of(of, 512, 63).held.blocks == 40  # 638 tokens
    assert option_of(of, 513, 64).held.blocks == 41  # 641 tokens


def test_an_age_counts_the_tokens_decoded_since() -> None:
    """With r = 0 a token is a candidate before the next one is computed."""
    found = option_of(plan(given_lengths(10, 20)), 20, 0)
    assert found.share_kept[1] == pytest.approx(10 / 11)
    assert found.share_kept[4] == pytest.approx((10 / 11) ** 4)


def test_no_dense_request_is_half_grown_where_none_fits_in_the_end() -> None:
    assert dense(plan(num_blocks=193)).requests_half_grown == 0


def test_dense_at_full_length_and_at_the_mean_over_its_life() -> None:
    full = dense(plan(num_blocks=1000))
    assert (full.tokens, full.blocks, full.requests) == (3100, 194, 5)
    assert full.mean_tokens == pytest.approx(100 + 2999 / 2)
    assert full.requests_half_grown == 9  # 100.5 blocks


def test_a_request_that_never_reaches_the_budget_holds_its_own_length() -> None:
    of = plan(given_lengths(100, 300))
    found = option_of(of, 512)
    assert found.held == dense(of)
    assert found.rounds == 0
    assert (found.over_dense, found.half_grown_over_dense) == (1.0, 1.0)
    assert found.share_of_output_kept == 1.0


def test_ratios_are_over_dense_of_the_same_kind() -> None:
    of = plan(num_blocks=1000)
    found = option_of(of, 512)
    assert found.over_dense == 25 / 5
    assert found.half_grown_over_dense == found.held.requests_half_grown / 9
    assert found.modelled_speedup is None
    none_fits = option_of(plan(num_blocks=100), 512)
    assert (none_fits.held.requests, none_fits.over_dense) == (2, None)


SHAPE = ModelShape("none", 1, 1, 1, 1, "bfloat16", "bfloat16", None)
STEP = StepTime("constants", 0.01, 1e-9, 0.0, "nobody")


def test_the_speedup_is_that_of_the_modelled_steps() -> None:
    of = plan(num_blocks=1000, step_time=STEP)
    held, full = option_of(of, 512).held, dense(of)
    for one in (held, full):
        step = 0.01 + one.requests_half_grown * one.mean_tokens * 4 * 1e-9
        assert one.tokens_per_second == pytest.approx(one.requests_half_grown / step)
    assert held.tokens_per_second is not None
    assert full.tokens_per_second is not None
    expected = held.tokens_per_second / full.tokens_per_second
    assert option_of(of, 512).modelled_speedup == pytest.approx(expected)


def test_no_more_run_at_once_than_wanted() -> None:
    of = plan(num_blocks=1000, step_time=STEP, concurrency=12)
    held = option_of(of, 512).held
    assert held.requests_half_grown > 12
    step = 0.01 + 12 * held.mean_tokens * 4 * 1e-9
    assert held.tokens_per_second == pytest.approx(12 / step)


def log_of(*lengths: tuple[int, int]) -> Workload:
    prompts, outputs = np.array(lengths).T
    return Workload("log", prompts, outputs)


def test_a_logs_mean_is_over_steps_and_its_longest_over_requests() -> None:
    of = plan(log_of((10, 10), (10, 990)))
    full = dense(of)
    assert full.tokens == 1000
    steps = sum(range(10, 20)) + sum(range(10, 1000))
    assert full.mean_tokens == pytest.approx(steps / 1000)


def test_prompts_above_the_budget_are_refused_and_counted() -> None:
    lengths = [(10, 500)] * 97 + [(5000, 10)] * 3
    found = option_of(plan(log_of(*lengths), num_blocks=10_000), 64, 16)
    assert found.refused_share == pytest.approx(0.03)
    assert found.held.tokens == 96
    assert found.generated_per_place == pytest.approx(500 / 54)


def test_a_budget_below_the_prompt_names_both() -> None:
    with pytest.raises(
        RandKVConfigError, match=r"budget has value 99: expected at least the prompt's 100"
    ):
        option_of(plan(), 99)


def test_a_budget_of_the_prompt_alone_leaves_no_place() -> None:
    found = option_of(plan(), 100)
    assert found.generated_per_place is None
    assert found.share_kept[2048] == 0.0


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, 3])
def test_memory_for_no_request_is_refused(num_blocks: int) -> None:
    with pytest.raises(RandKVConfigError, match="kv_memory has value"):
        compare(plan(num_blocks=num_blocks), 64)


@pytest.mark.parametrize(
    ("field", "changes"), [("block_size", {"block_size": 0}), ("concurrency", {"concurrency": 0})]
)
def test_a_plan_of_nothing_is_refused(field: str, changes: dict[str, int]) -> None:
    with pytest.raises(RandKVConfigError, match=f"{field} has value 0"):
        plan(**changes)  # type: ignore[arg-type]


def recommended(of: Plan, *budgets: int) -> tuple[int | None, str]:
    full, options = compare(of, 64, budgets)
    found = recommend(of, full, options)
    if found.budget is None:
        assert found.policy == ({"type": "dense"} if full.requests else None)
        assert found.requests == (full.requests_half_grown if of.workload.is_log else full.requests)
    return found.budget, " ".join(found.reasons)


def test_without_a_wanted_number_the_smallest_that_is_not_crowded() -> None:
    budget, why = recommended(plan())
    assert budget == 1024
    assert "3.2 generated tokens" in why
    assert "924 positions beside the prompt" in why
    assert "arXiv 2609.03430" in why


def test_dense_where_the_wanted_requests_fit_anyway() -> None:
    budget, why = recommended(plan(concurrency=5))
    assert budget is None
    assert "bring nothing" in why
    assert recommended(plan(concurrency=6))[0] is not None


def test_the_largest_budget_that_holds_the_wanted_requests() -> None:
    assert recommended(plan(concurrency=7))[0] == 2048  # 136 blocks
    assert recommended(plan(concurrency=8))[0] == 1024
    assert recommended(plan(concurrency=13))[0] == 1024  # 72 blocks
    budget, why = recommended(plan(concurrency=14))
    assert budget == 512
    assert "Measure the quality" in why


def test_never_a_crowded_budget_however_many_are_wanted() -> None:
    budget, why = recommended(plan(concurrency=1000))
    assert budget == 512  # 256 would leave 19 generated tokens per place
    assert "holds 25 of the wanted 1,000" in why
    assert recommended(plan(concurrency=1000), 256)[0] is None
    assert recommended(plan(given_lengths(100, 3200), concurrency=1000), 500)[0] is None  # 8.0
    assert recommended(plan(given_lengths(100, 3199), concurrency=1000), 500)[0] == 500


def test_dense_where_only_crowded_budgets_are_listed() -> None:
    budget, why = recommended(plan(), 512)
    assert budget is None
    assert "5 or more generated tokens" in why
    budget, why = recommended(plan(), 256)
    assert budget is None
    assert "8 or more generated tokens" in why


def test_dense_where_no_round_would_run() -> None:
    budget, why = recommended(plan(given_lengths(100, 94)), 128)
    assert budget is None
    assert "K + r = 192" in why
    assert "no round would ever run" not in recommended(plan(given_lengths(100, 95)), 128)[1]


def test_dense_where_no_more_requests_fit() -> None:
    budget, why = recommended(plan(given_lengths(100, 3000), num_blocks=400), 3000)
    assert budget is None
    assert "bring nothing" in why


def test_nothing_where_no_dense_request_fits_and_no_budget_is_fit() -> None:
    budget, why = recommended(plan(num_blocks=60))  # budget 1,024 takes 72, 512 is crowded
    assert budget is None
    assert "5 or more generated tokens" in why
    assert "Not one dense request of full length fits either: it takes 0.01 GiB" in why
    assert "Add memory" in why
    budget, why = recommended(plan(num_blocks=60, concurrency=1))
    assert budget == 512


def test_nothing_where_a_logs_longest_request_fits_only_as_refused() -> None:
    of = plan(log_of(*[(10, 50)] * 97, *[(5000, 10)] * 3), num_blocks=100)
    full, options = compare(of, 16, [64])
    assert options[0].held.requests == 25
    found = recommend(of, full, options)
    assert found.policy is None
    assert "Not one dense request" in found.reasons[-1]


def test_a_budget_where_not_one_dense_request_fits() -> None:
    budget, why = recommended(plan(num_blocks=100))
    assert budget == 1024
    assert "Not one dense request" in why


@given(
    st.integers(1, 3000),
    st.integers(1, 40_000),
    st.integers(200, 5000),
    st.none() | st.integers(1, 300),
    st.integers(0, 200),
)
def test_what_is_recommended_is_listed_holds_the_prompt_and_fits(
    prompt: int, output: int, num_blocks: int, concurrency: int | None, buffer_size: int
) -> None:
    of = plan(given_lengths(prompt, output), num_blocks=num_blocks, concurrency=concurrency)
    try:
        full, options = compare(of, buffer_size)
    except RandKVConfigError:
        return
    found = recommend(of, full, options)
    assert found.reasons
    advice = Advice(SHAPE, 1, None, of, full, options, found, [])
    if found.policy is None:
        assert (found.budget, found.requests, full.requests) == (None, 0, 0)
        assert advice.server_options == []
        assert "--kv-cache-policy" not in to_text(advice)
        return
    words = shlex.split(to_text(advice).splitlines()[-1])
    pasted = dict(zip(words[::2], words[1::2], strict=True))
    policy = EnginePolicy.parse(pasted["--kv-cache-policy"], pasted.get("--kv-cache-policy-limits"))
    assert policy is not None
    if found.budget is None:
        assert full.requests
        assert policy.default is None
        return
    assert policy.default == RandKVConfig(found.budget, buffer_size)
    (one,) = (o for o in options if o.budget == found.budget)
    assert one.budget > prompt
    assert one.rounds > 0
    assert one.generated_per_place is not None
    assert one.generated_per_place < 8
    assert found.requests == one.held.requests >= 1
    assert one.held.requests_half_grown > full.requests_half_grown


def test_of_a_log_the_mean_length_decides() -> None:
    """Nine short requests to one long one: at the longest 5 dense ones fit, at the mean 16."""
    lengths = [(100, 300)] * 9 + [(100, 3000)]
    work = log_of(*lengths)
    full = dense(plan(work))
    assert full.requests == 5
    assert full.requests_half_grown == 16
    budget, why = recommended(plan(work, concurrency=16))
    assert budget is None
    assert "fit with the full cache at their mean length (16 do)" in why
    budget, why = recommended(plan(work, concurrency=17))
    assert budget == 2048
    assert "fit at their mean length" in why


def test_notes_say_what_is_measured_and_what_is_not() -> None:
    (plain,) = notes(plan(given_lengths(100, 9000)), None)
    assert "not of speed" in plain
    (roof,) = notes(plan(given_lengths(100, 9000), step_time=roofline(1e9, 1000)), None)
    assert "modelled, not measured" in roof
    (file,) = notes(plan(given_lengths(100, 9000), step_time=STEP), None)
    assert file == "Speed-ups are modelled, not measured, with the constants of: nobody."
    short, context = notes(plan(step_time=STEP), 2048)[1:]
    assert "0.52x to 0.96x" in short
    assert "3,100 tokens are more than the model's 2,048 positions" in context
    assert any("95th percentiles" in note for note in notes(plan(log_of((1, 1))), None))
