# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from randkv import RandKVConfig, RandKVConfigError
from randkv.config import EnginePolicy, PolicyLimits, RequestPolicy


def test_defaults() -> None:
    assert RandKVConfig() == RandKVConfig(budget=2048, buffer_size=64, seed=0)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RandKVConfig().budget = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "value",
    [
        {"type": "randkv", "budget": 256, "buffer_size": 32, "seed": 7},
        '{"type": "randkv", "budget": 256, "buffer_size": 32, "seed": 7}',
        RandKVConfig(256, 32, 7),
    ],
)
def test_parse_takes_a_dict_and_its_json_text(value: Any) -> None:
    assert RandKVConfig.parse(value) == RandKVConfig(256, 32, 7)


def test_parse_takes_the_name() -> None:
    assert RandKVConfig.parse("randkv") == RandKVConfig()
    assert RandKVConfig.parse({"type": "randkv"}) == RandKVConfig()


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (None, "kv_cache_policy"),
        (3, "kv_cache_policy"),
        ([], "kv_cache_policy"),
        ("randkvv", "kv_cache_policy"),
        ("{", "kv_cache_policy"),
        ("[" * 200_000, "kv_cache_policy"),
        ({1: 2}, "kv_cache_policy"),
        ({"budget": 3}, "kv_cache_policy.type"),
        ({"type": "window"}, "kv_cache_policy.type"),
        ({"type": ["randkv"]}, "kv_cache_policy.type"),
        ("dense", "kv_cache_policy.type"),
        ({"type": "randkv", "budgets": 3}, "kv_cache_policy.budgets"),
        ({"type": "randkv", "request_key": "a"}, "kv_cache_policy.request_key"),
        ({"type": "randkv", "budget": 0}, "kv_cache_policy.budget"),
        ({"type": "randkv", "budget": "256"}, "kv_cache_policy.budget"),
        ({"type": "randkv", "budget": 2**31}, "kv_cache_policy.budget"),
        ({"type": "randkv", "buffer_size": 2**70}, "kv_cache_policy.buffer_size"),
        ({"type": "randkv", "budget": 1.0}, "kv_cache_policy.budget"),
        ({"type": "randkv", "budget": True}, "kv_cache_policy.budget"),
        ({"type": "randkv", "budget": None}, "kv_cache_policy.budget"),
        ({"type": "randkv", "buffer_size": -1}, "kv_cache_policy.buffer_size"),
        ({"type": "randkv", "seed": -1}, "kv_cache_policy.seed"),
        ({"type": "randkv", "seed": 2**64}, "kv_cache_policy.seed"),
    ],
)
def test_parse_names_the_bad_field(value: Any, field: str) -> None:
    with pytest.raises(RandKVConfigError) as caught:
        RandKVConfig.parse(value)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} has value ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "value",
    [
        "x" * 1_000_000,
        {"type": "randkv", "x" * 1_000_000: 1},
        {"type": "x" * 1_000_000},
        {"type": "randkv", "budget": 10**5000},
    ],
)
def test_error_text_is_bounded_however_large_the_value(value: Any) -> None:
    with pytest.raises(RandKVConfigError) as caught:
        RandKVConfig.parse(value)
    assert len(str(caught.value)) < 500


def test_lengths_follow_from_the_config() -> None:
    config = RandKVConfig(budget=256, buffer_size=32)
    assert (config.compacted_len, config.round_interval, config.max_physical_len) == (288, 32, 320)
    unbuffered = RandKVConfig(budget=8, buffer_size=0)
    assert (unbuffered.compacted_len, unbuffered.max_physical_len) == (8, 9)


class TestLimits:
    def test_parse(self) -> None:
        text = '{"allow_dense": false, "budget": [64, 8192], "buffer_size": [0, 512]}'
        assert PolicyLimits.parse(text) == PolicyLimits(False, (64, 8192), (0, 512))
        assert PolicyLimits.parse(None) == PolicyLimits()

    @pytest.mark.parametrize(
        ("value", "field"),
        [
            ("no", "kv_cache_policy_limits"),
            ([], "kv_cache_policy_limits"),
            ({"budgets": [1, 2]}, "kv_cache_policy_limits.budgets"),
            ({"allow_dense": 1}, "kv_cache_policy_limits.allow_dense"),
            ({"budget": [1]}, "kv_cache_policy_limits.budget"),
            ({"budget": [9, 8]}, "kv_cache_policy_limits.budget"),
            ({"budget": [0, 8]}, "kv_cache_policy_limits.budget[0]"),
            ({"buffer_size": [0, "8"]}, "kv_cache_policy_limits.buffer_size[1]"),
        ],
    )
    def test_parse_names_the_bad_field(self, value: Any, field: str) -> None:
        with pytest.raises(RandKVConfigError) as caught:
            PolicyLimits.parse(value)
        assert caught.value.field == field


class TestEnginePolicy:
    def test_none_is_off(self) -> None:
        assert EnginePolicy.parse(None, None) is None

    def test_limits_without_a_policy_are_refused(self) -> None:
        with pytest.raises(RandKVConfigError, match="kv_cache_policy_limits"):
            EnginePolicy.parse(None, {})

    def test_dense_is_a_default_without_fields(self) -> None:
        policy = EnginePolicy.parse("dense", None)
        assert policy is not None
        assert policy.default is None
        with pytest.raises(RandKVConfigError, match="kv_cache_policy.budget"):
            EnginePolicy.parse({"type": "dense", "budget": 5}, None)

    def test_default_outside_the_limits_is_refused(self) -> None:
        with pytest.raises(RandKVConfigError, match="kv_cache_policy.budget"):
            EnginePolicy.parse("randkv", {"budget": [1, 100]})
        with pytest.raises(RandKVConfigError, match="kv_cache_policy.type"):
            EnginePolicy.parse("dense", {"allow_dense": False})

    @pytest.mark.parametrize(
        ("limits", "bound"),
        [
            (None, None),
            ({"allow_dense": False}, 2048 + 2 * 64),
            ({"allow_dense": False, "budget": [1, 4096]}, 4096 + 2 * 64),
            ({"allow_dense": False, "budget": [1, 4096], "buffer_size": [0, 100]}, 4296),
            ({"budget": [1, 4096], "buffer_size": [0, 100]}, None),
        ],
    )
    def test_bound_is_known_only_when_nothing_longer_is_allowed(
        self, limits: Any, bound: int | None
    ) -> None:
        policy = EnginePolicy.parse("randkv", limits)
        assert policy is not None
        assert policy.max_physical_len == bound

    def test_without_dense_a_range_that_is_not_given_ends_at_the_default(self) -> None:
        policy = EnginePolicy.parse("randkv", {"allow_dense": False})
        assert resolve(policy, {"type": "randkv", "budget": 100}).config is not None
        with pytest.raises(RandKVConfigError, match="from 1 to 2048"):
            resolve(policy, {"type": "randkv", "budget": 2049})
        with pytest.raises(RandKVConfigError, match="from 0 to 64"):
            resolve(policy, {"type": "randkv", "buffer_size": 65})

    def test_pickles(self) -> None:
        policy = EnginePolicy.parse("randkv", {"budget": [1, 4096]})
        assert pickle.loads(pickle.dumps(policy)) == policy


def resolve(policy: EnginePolicy | None, override: Any = None, **changes: Any) -> RequestPolicy:
    assert policy is not None
    arguments: dict[str, Any] = {"seed": None, "request_id": "cmpl-1", "prompt_len": 5}
    return policy.resolve(override, **{**arguments, **changes})


class TestResolve:
    default = EnginePolicy.parse(
        {"type": "randkv", "budget": 64, "buffer_size": 8, "seed": 3}, None
    )

    def test_missing_fields_come_from_the_default(self) -> None:
        assert resolve(self.default).config == RandKVConfig(64, 8, 3)
        assert resolve(self.default, "randkv").config == RandKVConfig(64, 8, 3)
        override = {"type": "randkv", "budget": 100}
        assert resolve(self.default, override).config == RandKVConfig(100, 8, 3)

    def test_dense_engine_uses_the_policy_defaults(self) -> None:
        assert resolve(EnginePolicy.parse("dense", None), "randkv").config == RandKVConfig()
        assert resolve(EnginePolicy.parse("dense", None)).config is None

    def test_request_key_is_the_callers_then_the_seed_then_the_request_id(self) -> None:
        override = {"type": "randkv", "request_key": "mine"}
        assert resolve(self.default, override, seed=1).request_key == "mine"
        assert resolve(self.default, seed=1).request_key == "seed:1"
        assert resolve(self.default).request_key == "cmpl-1"
        assert resolve(self.default, {"type": "dense", "request_key": "k"}).request_key == "k"

    @pytest.mark.parametrize(
        ("override", "field"),
        [
            ({"type": "randkv", "budgett": 3}, "kv_cache_policy.budgett"),
            ({"type": "dense", "budget": 3}, "kv_cache_policy.budget"),
            ({"type": "randkv", "request_key": ""}, "kv_cache_policy.request_key"),
            ({"type": "randkv", "request_key": "a" * 513}, "kv_cache_policy.request_key"),
            ({"type": "randkv", "request_key": "\ud800"}, "kv_cache_policy.request_key"),
            ({"type": "randkv", "request_key": 5}, "kv_cache_policy.request_key"),
            ({"type": "randkv", "buffer_size": 1e9}, "kv_cache_policy.buffer_size"),
        ],
    )
    def test_bad_override_names_the_field(self, override: Any, field: str) -> None:
        with pytest.raises(RandKVConfigError) as caught:
            resolve(self.default, override)
        assert caught.value.field == field

    def test_prompt_longer_than_the_budget_names_both_numbers_and_the_remedy(self) -> None:
        assert resolve(self.default, prompt_len=64).config is not None
        with pytest.raises(RandKVConfigError, match=r"64.*65 tokens.*Raise the budget.*dense"):
            resolve(self.default, prompt_len=65)
        assert resolve(self.default, "dense", prompt_len=65).config is None

    def test_limits_bound_overrides(self) -> None:
        policy = EnginePolicy.parse("randkv", {"allow_dense": False, "budget": [64, 4096]})
        with pytest.raises(RandKVConfigError, match=r"kv_cache_policy\.type"):
            resolve(policy, "dense")
        with pytest.raises(RandKVConfigError, match="64 to 4096"):
            resolve(policy, {"type": "randkv", "budget": 4097})
        with pytest.raises(RandKVConfigError) as caught:
            resolve(policy, prompt_len=5000)
        assert "dense" not in str(caught.value)

    def test_travels_as_a_dict(self) -> None:
        for override in ("randkv", "dense"):
            policy = resolve(self.default, override)
            assert RequestPolicy.from_dict(policy.to_dict()) == policy
        assert resolve(self.default).child(2).request_key == "cmpl-1/2"
