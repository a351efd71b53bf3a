# SPDX-License-Identifier: Apache-2.0
"""The policy's parameters: parse, validate, resolve a request's override. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from randkv.errors import RandKVConfigError, RefusalReason

MAX_SEED = 2**64 - 1
MAX_TOKENS = 2**31 - 1
MAX_REQUEST_KEY_LEN = 512
MAX_SHOWN_KEY_LEN = 64
PolicyType = Literal["dense", "randkv"]
LongPrompt = Literal["refuse", "dense"]
_TYPES = ("dense", "randkv")


def check_integer(field: str, value: Any, low: int, high: int, remedy: str = "") -> int:
    """`value`, when it is an integer from `low` to `high`; RandKVConfigError otherwise."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        reason: RefusalReason = "out_of_range" if is_integer else "malformed"
        raise RandKVConfigError(field, value, f"an integer from {low} to {high}", remedy, reason)
    return int(value)


def check_number(field: str, value: Any, *, low: float | None = None, high: float) -> float:
    """`value`, when it is a number from `low` (None: above 0) to `high`.

    Raises:
        RandKVConfigError: It is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 if low is None else value >= low) or not value <= high:
        start = "above 0, at most" if low is None else f"from {low:g} to"
        reason: RefusalReason = "out_of_range" if is_number else "malformed"
        raise RandKVConfigError(field, value, f"a number {start} {high:g}", reason=reason)
    return float(value)


def _json(field: str, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RandKVConfigError(field, text, expected, reason="malformed") from None


def _mapping(field: str, value: Any) -> dict[str, Any]:
    """The dict behind a policy given as a name, a dict, or JSON text of a dict."""
    expected = '"randkv", "dense", or an object like {"type": "randkv", "budget": 2048}'
    if isinstance(value, str):
        if value in _TYPES:
            return {"type": value}
        value = _json(field, value, expected)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RandKVConfigError(field, value, expected, reason="malformed")
    mapping = dict(value)
    if mapping.get("type") not in _TYPES:
        raise RandKVConfigError(
            f"{field}.type", mapping.get("type"), '"randkv" or "dense"', reason="malformed"
        )
    return mapping


def _refuse_unknown(field: str, mapping: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in mapping:
        if key not in known:
            name = key if len(key) <= MAX_SHOWN_KEY_LEN else f"{key[:MAX_SHOWN_KEY_LEN]}…"
            expected = f"one of the keys {', '.join(known)}"
            raise RandKVConfigError(
                f"{field}.{name}", mapping[key], expected, reason="unknown_field"
            )


def check_request_key(field: str, value: Any) -> str:
    """`value`, when it can name a request.

    Raises:
        RandKVConfigError: Not a string, too long, or nothing that UTF-8 can encode.
    """
    expected = f"a string of 1 to {MAX_REQUEST_KEY_LEN} characters"
    if not isinstance(value, str):
        raise RandKVConfigError(field, value, expected, reason="malformed")
    if not 1 <= len(value) <= MAX_REQUEST_KEY_LEN:
        raise RandKVConfigError(field, value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        expected += " that UTF-8 can encode"
        raise RandKVConfigError(field, value, expected, reason="malformed") from None
    return value


@dataclass(frozen=True, slots=True)
class RandKVConfig:
    """Keep the prompt and the newest tokens, drop older generated tokens at random per KV head.

    Source: Random Attention, arXiv 2609.03430. Differs from the paper's code in that the prompt
    is never dropped and a prompt longer than the budget is refused.

    Attributes:
        budget: KV positions that stay per KV head, prompt included; tokens, 1 to 2**31 - 1.
        buffer_size: Newest tokens, on top of the budget, that are never dropped; tokens, 0 to
            2**31 - 1.
        seed: Part of the selection's key; 0 <= seed < 2**64.
    """

    budget: int = 2048
    buffer_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("kv_cache_policy.budget", self.budget, 1, MAX_TOKENS)
        check_integer("kv_cache_policy.buffer_size", self.buffer_size, 0, MAX_TOKENS)
        check_integer("kv_cache_policy.seed", self.seed, 0, MAX_SEED)

    @classmethod
    def parse(cls, value: Any) -> RandKVConfig:
        """The config behind ``"randkv"``, a dict with ``type: randkv``, or JSON text of one.

        Raises:
            RandKVConfigError: An unknown key, type or range; the error names it.
        """
        if isinstance(value, RandKVConfig):
            return value
        mapping = _mapping("kv_cache_policy", value)
        if mapping.pop("type") != "randkv":
            raise RandKVConfigError("kv_cache_policy.type", "dense", '"randkv"')
        _refuse_unknown("kv_cache_policy", mapping, tuple(f.name for f in fields(cls)))
        return cls(**mapping)

    def to_dict(self) -> dict[str, Any]:
        return {"type": "randkv", **asdict(self)}

    @property
    def compacted_len(self) -> int:
        """Physical length after a round, ``K + r``; tokens."""
        return self.budget + self.buffer_size

    @property
    def round_interval(self) -> int:
        """Decoded tokens between two rounds."""
        return max(self.buffer_size, 1)

    @property
    def max_physical_len(self) -> int:
        """The longest that a request ever is in the cache, reached just before a round; tokens."""
        return self.compacted_len + self.round_interval


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """What one request runs under. `config` is None for a dense request.

    `request_key` is the identity that its keep-sets are a function of. `long_prompt` says that
    the request is dense only because its prompt is longer than the budget it would have had.
    """

    config: RandKVConfig | None
    request_key: str
    long_prompt: bool = False

    @property
    def type(self) -> PolicyType:
        return "dense" if self.config is None else "randkv"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form that travels to the engine in ``SamplingParams.extra_args``."""
        base = {"type": "dense"} if self.config is None else self.config.to_dict()
        return {**base, "request_key": self.request_key, "long_prompt": self.long_prompt}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> RequestPolicy:
        """Inverse of `to_dict`."""
        mapping = dict(value)
        request_key, long_prompt = mapping.pop("request_key"), mapping.pop("long_prompt")
        config = RandKVConfig.parse(mapping) if mapping["type"] == "randkv" else None
        return cls(config, request_key, long_prompt)

    def child(self, index: int) -> RequestPolicy:
        """The policy of sample `index` of a request with ``n > 1``."""
        return RequestPolicy(self.config, f"{self.request_key}/{index}", self.long_prompt)


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """What a request may ask for. None leaves a field unbounded.

    Where `allow_dense` is false, `EnginePolicy.parse` replaces None by a range that ends at the
    engine's default: an unbounded budget would be the full cache by another name.

    Attributes:
        allow_dense: Whether a request may ask for, or default to, the full cache.
        budget: Inclusive range of a request's budget; tokens.
        buffer_size: Inclusive range of a request's buffer size; tokens.
        long_prompt: What happens to a request whose prompt is longer than its budget: it is
            refused, or served with the full cache.
    """

    allow_dense: bool = True
    budget: tuple[int, int] | None = None
    buffer_size: tuple[int, int] | None = None
    long_prompt: LongPrompt = "refuse"

    @classmethod
    def parse(cls, value: Any) -> PolicyLimits:
        """The limits behind None, a dict, or JSON text of one.

        Raises:
            RandKVConfigError: An unknown key, or a value that is not a flag or a range.
        """
        field = "kv_cache_policy_limits"
        if value is None:
            return cls()
        expected = 'an object like {"allow_dense": false, "budget": [64, 8192]}'
        if isinstance(value, str):
            value = _json(field, value, expected)
        if not isinstance(value, Mapping):
            raise RandKVConfigError(field, value, expected)
        _refuse_unknown(field, value, tuple(f.name for f in fields(cls)))
        allow_dense = value.get("allow_dense", True)
        if not isinstance(allow_dense, bool):
            raise RandKVConfigError(f"{field}.allow_dense", allow_dense, "true or false")
        long_prompt = value.get("long_prompt", "refuse")
        if long_prompt not in ("refuse", "dense"):
            raise RandKVConfigError(f"{field}.long_prompt", long_prompt, '"refuse" or "dense"')
        if long_prompt == "dense" and not allow_dense:
            raise RandKVConfigError(
                f"{field}.long_prompt", long_prompt, '"refuse" while allow_dense is false'
            )
        return cls(
            allow_dense,
            cls._range(f"{field}.budget", value.get("budget"), 1),
            cls._range(f"{field}.buffer_size", value.get("buffer_size"), 0),
            long_prompt,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def _range(field: str, value: Any, low: int) -> tuple[int, int] | None:
        if value is None:
            return None
        expected = f"a pair [low, high] of integers with {low} <= low <= high"
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise RandKVConfigError(field, value, expected)
        first, last = (
            check_integer(f"{field}[{i}]", item, low, MAX_TOKENS) for i, item in enumerate(value)
        )
        if first > last:
            raise RandKVConfigError(field, value, expected)
        return first, last

    def check(self, config: RandKVConfig | None) -> None:
        """Raises RandKVConfigError when `config` (None for dense) is out of these limits."""
        if config is None:
            if not self.allow_dense:
                raise RandKVConfigError(
                    "kv_cache_policy.type",
                    "dense",
                    '"randkv"',
                    "This server does not allow the full cache.",
                    "not_allowed",
                )
            return
        for name, limit in (("budget", self.budget), ("buffer_size", self.buffer_size)):
            if limit is not None:
                check_integer(f"kv_cache_policy.{name}", getattr(config, name), *limit)


@dataclass(frozen=True, slots=True)
class EnginePolicy:
    """The engine's default policy (`default` is None for dense) and its limits."""

    default: RandKVConfig | None
    limits: PolicyLimits

    @classmethod
    def parse(cls, policy: Any, limits: Any) -> EnginePolicy | None:
        """None when `policy` is None: the engine then behaves as if RandKV were not there.

        Raises:
            RandKVConfigError: Either value is bad, or the default is outside the limits.
        """
        if policy is None:
            if limits is not None:
                raise RandKVConfigError(
                    "kv_cache_policy_limits",
                    limits,
                    "no limits while kv_cache_policy is not set",
                    'Set kv_cache_policy to "randkv" or "dense" as well.',
                )
            return None
        mapping = (
            policy if isinstance(policy, RandKVConfig) else _mapping("kv_cache_policy", policy)
        )
        default: RandKVConfig | None = None
        if isinstance(mapping, RandKVConfig) or mapping["type"] == "randkv":
            default = RandKVConfig.parse(mapping)
        else:
            _refuse_unknown("kv_cache_policy", mapping, ("type",))
        parsed = PolicyLimits.parse(limits)
        if default is not None and not parsed.allow_dense:
            parsed = PolicyLimits(
                allow_dense=False,
                budget=parsed.budget or (1, default.budget),
                buffer_size=parsed.buffer_size or (0, default.buffer_size),
                long_prompt=parsed.long_prompt,
            )
        parsed.check(default)
        return cls(default, parsed)

    @property
    def max_physical_len(self) -> int | None:
        """The longest that any allowed request ever is in the cache; None when unbounded."""
        limits = self.limits
        if limits.allow_dense or limits.budget is None or limits.buffer_size is None:
            return None
        return RandKVConfig(limits.budget[1], limits.buffer_size[1]).max_physical_len

    def resolve(
        self, override: Any, *, seed: int | None, request_id: str, prompt_len: int
    ) -> RequestPolicy:
        """The policy of one request: its override over the engine's default, within the limits.

        Args:
            override: ``kv_cache_policy`` of the request, or None.
            seed: The request's sampling seed; names the request when no request_key is given.
            request_id: The id that the caller knows; names the request when there is no seed.
            prompt_len: Prompt tokens.

        Raises:
            RandKVConfigError: Names the field.
        """
        config, request_key = self.parse_override(override)
        if request_key is None:
            request_key = request_id if seed is None else f"seed:{seed}"
        if config is not None and prompt_len > config.budget:
            if self.limits.long_prompt == "dense":
                return RequestPolicy(None, request_key, long_prompt=True)
            remedy = f"Raise the budget to {prompt_len} or more, or shorten the prompt"
            remedy += ', or ask for kv_cache_policy "dense".' if self.limits.allow_dense else "."
            raise RandKVConfigError(
                "kv_cache_policy.budget",
                config.budget,
                f"at least the prompt's {prompt_len} tokens, all of which are kept",
                remedy,
                "long_prompt",
            )
        return RequestPolicy(config, request_key)

    def parse_override(self, override: Any) -> tuple[RandKVConfig | None, str | None]:
        """Config and request key that `override` (None: nothing) asks for, within the limits.

        Raises:
            RandKVConfigError: Names the field.
        """
        if override is None:
            return self.default, None
        field, request_key = "kv_cache_policy", None
        mapping = _mapping(field, override)
        if "request_key" in mapping:
            request_key = check_request_key(f"{field}.request_key", mapping.pop("request_key"))
        config = None
        if mapping.pop("type") == "dense":
            _refuse_unknown(field, mapping, ("type", "request_key"))
        else:
            known = tuple(f.name for f in fields(RandKVConfig))
            _refuse_unknown(field, mapping, ("type", *known, "request_key"))
            config = RandKVConfig(**{**asdict(self.default or RandKVConfig()), **mapping})
        self.limits.check(config)
        return config, request_key
