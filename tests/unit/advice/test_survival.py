# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from randkv import RandKVConfig
from randkv.advice.survival import (
    share_kept,
    share_of_output_kept,
    units_over_life,
)
from randkv.planner import first_due, physical_len, replay, rounds_run
from randkv.retention import retention_map

configs = st.builds(RandKVConfig, st.integers(1, 40), st.integers(0, 12))


def held(config: RandKVConfig, prompt: int, computed: int, kv_heads: int = 1) -> np.ndarray:
    """By the real rounds, ``bool [kv_heads, computed]``."""
    return retention_map(
        config,
        request_key="k",
        prompt_tokens=prompt,
        computed_tokens=computed,
        layer=0,
        num_kv_heads=kv_heads,
    ).kept


@given(configs, st.integers(1, 40), st.integers(0, 120))
def test_rounds_and_lengths_are_the_real_ones(
    config: RandKVConfig, prompt: int, generated: int
) -> None:
    prompt = min(prompt, config.budget)
    computed = prompt + generated
    real = replay(
        config,
        request_key="k",
        prompt_len=prompt,
        num_tokens=computed - 1,
        num_layers=1,
        num_kv_heads=1,
    )
    assert rounds_run(config, computed) == len(real)
    assert physical_len(config, computed) == held(config, prompt, computed).sum()


@given(configs, st.integers(1, 40), st.integers(1, 120))
def test_expected_tokens_add_up_to_those_held(
    config: RandKVConfig, prompt: int, generated: int
) -> None:
    """Every head holds as many, so the probabilities of all positions sum to that exactly."""
    prompt = min(prompt, config.budget)
    computed = prompt + generated
    shares = [
        share_kept(config, prompt_tokens=prompt, computed_tokens=computed, position=position)
        for position in range(computed)
    ]
    assert shares[:prompt] == [1.0] * prompt
    assert sum(shares) == pytest.approx(physical_len(config, computed))
    mean = share_of_output_kept(config, prompt_tokens=prompt, output_tokens=generated + 1)
    assert mean == pytest.approx(sum(shares[prompt:]) / generated)


@given(configs, st.integers(1, 40), st.integers(1, 4))
def test_a_round_keeps_what_it_does_not_evict_of_its_candidates(
    config: RandKVConfig, prompt: int, num_rounds: int
) -> None:
    """Against the planner's own rounds: candidates are the slots from P to L - r."""
    prompt = min(prompt, config.budget)
    num_tokens = first_due(config) + (num_rounds - 1) * config.round_interval
    product = 1.0
    old_len = first_due(config)
    for done in replay(
        config,
        request_key="k",
        prompt_len=prompt,
        num_tokens=num_tokens,
        num_layers=1,
        num_kv_heads=1,
    ):
        candidates = old_len - config.buffer_size - prompt
        product *= 1 - done.evicted_positions.shape[2] / candidates
        old_len = config.max_physical_len
    oldest = share_kept(
        config, prompt_tokens=prompt, computed_tokens=num_tokens + 1, position=prompt
    )
    assert oldest == pytest.approx(product)


def test_shares_are_those_of_many_heads() -> None:
    """8,192 heads drawn by the real selection; five standard errors."""
    config, prompt, computed = RandKVConfig(96, 16), 20, 400
    kept = np.concatenate(
        [
            retention_map(
                config,
                request_key=key,
                prompt_tokens=prompt,
                computed_tokens=computed,
                layer=0,
                num_kv_heads=1024,
            ).kept
            for key in "abcdefgh"
        ]
    )
    for position in range(computed):
        expected = share_kept(
            config, prompt_tokens=prompt, computed_tokens=computed, position=position
        )
        error = np.sqrt(expected * (1 - expected) / len(kept))
        assert abs(kept[:, position].mean() - expected) <= 5 * error + 1e-12


def test_the_papers_figure() -> None:
    """``((K - P) / (K + r - P))**n``, about 0.94**n at K = 1024, r = 64."""
    config, prompt, rounds = RandKVConfig(1024, 64), 100, 10
    computed = 10_000
    last_round = first_due(config) + (rounds_run(config, computed) - 1) * 64
    position = last_round - 64 * (rounds - 1) - 64 - 1
    found = share_kept(config, prompt_tokens=prompt, computed_tokens=computed, position=position)
    assert found == pytest.approx((924 / 988) ** rounds)
    younger = share_kept(
        config, prompt_tokens=prompt, computed_tokens=computed, position=position + 1
    )
    assert younger == pytest.approx((924 / 988) ** (rounds - 1))


@given(configs, st.integers(1, 40), st.integers(1, 120), st.integers(1, 20))
def test_units_over_life_are_the_sum_over_the_steps(
    config: RandKVConfig, prompt: int, output: int, unit: int
) -> None:
    prompt = min(prompt, config.budget)
    steps = range(prompt, prompt + output)
    lengths = np.array([prompt]), np.array([output])
    expected = sum(-(-physical_len(config, computed) // unit) for computed in steps)
    assert units_over_life(config, *lengths, unit).tolist() == [expected]
    assert units_over_life(None, *lengths, unit).tolist() == [sum(-(-c // unit) for c in steps)]


def test_one_output_token_is_never_computed() -> None:
    assert share_of_output_kept(RandKVConfig(8, 2), prompt_tokens=8, output_tokens=1) == 1.0
