# SPDX-License-Identifier: Apache-2.0
"""The exception tree.

RandKVError
├── RandKVConfigError       bad policy, override or limit; also a ValueError
├── RandKVUnsupportedError  engine configuration that the policy cannot run with; also a ValueError
├── RandKVPatchError        the vLLM on this machine is not the one the patch is for
├── RandKVLayoutError       KV cache layout that the compactor does not know
└── RandKVCompactorError    the native compactor cannot be loaded, or its device reported a fault
"""

from __future__ import annotations

from typing import Any, Literal

RefusalReason = Literal[
    "malformed", "unknown_field", "out_of_range", "not_allowed", "long_prompt", "conflict"
]
"""Why a policy was refused; the values of the `reason` label of ``randkv_refused_overrides``."""

_MAX_SHOWN = 200


def shown(value: object) -> str:
    """`repr(value)`, cut so that an error text stays readable whatever the input was."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = f"an unprintable {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}… ({len(text)} characters)"


class RandKVError(Exception):
    """Base class of every error that this package raises on purpose."""


class RandKVConfigError(RandKVError, ValueError):
    """A policy field with a value that cannot be used.

    Attributes:
        field: Dotted path of the field, for example ``kv_cache_policy.budget``.
        value: The value that was given.
        expected: What would have been accepted.
        remedy: What to do, when that is more than using an accepted value.
        reason: The kind of mistake.
    """

    def __init__(
        self,
        field: str,
        value: Any,
        expected: str,
        remedy: str = "",
        reason: RefusalReason = "out_of_range",
    ) -> None:
        self.reason = reason
        self.field = field
        self.value = value
        self.expected = expected
        self.remedy = remedy
        text = f"{field} has value {shown(value)}: expected {expected}"
        super().__init__(f"{text}. {remedy}" if remedy else text)


class RandKVUnsupportedError(RandKVError, ValueError):
    """The engine is configured in ways the policy cannot run with; all of them are listed."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        super().__init__(f"kv_cache_policy cannot be used with this configuration:\n{lines}")


class RandKVPatchError(RandKVError):
    """The installed vLLM differs from what the patch expects: names file, expected, found."""


class RandKVLayoutError(RandKVError):
    """The KV cache of this attention backend does not fit the layouts that can be compacted."""


class RandKVCompactorError(RandKVError):
    """The native compactor cannot be loaded, or was told to touch a block that does not exist."""
