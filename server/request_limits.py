# SPDX-License-Identifier: Apache-2.0
"""What a request for generation may ask for, beyond what vLLM itself checks."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from server.body import MAX_NESTING
from server.override import FIELD
from server.refusal import Refusal

MAX_CONSTRAINT_BYTES = 64 * 2**10
"""Of a schema, regular expression, grammar or list of choices. The engine compiles these one after
another, for as long as it takes, and a megabyte takes more than a minute."""
_INTEGERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens")
_CONSTRAINTS = ("response_format", "structured_outputs", "text", "tools")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """See the options of the same names."""

    max_choices: int
    max_stop_strings: int
    max_output_tokens: int | None

    @classmethod
    def of(cls, args: Namespace) -> RequestLimits:
        return cls(args.max_choices, args.max_stop_strings, args.max_output_tokens)


def check_shapes(body: dict[str, Any]) -> None:
    """What vLLM itself does not survive, or answers with 500.

    Other wrong types are left to vLLM's own validation.

    Raises:
        Refusal: Names the field.
    """
    for name, value in body.items():
        if name != FIELD:  # checked on its own
            _check_numbers(name, value)
    for name in _INTEGERS:  # vLLM takes "7" and 7.0 too, past the limits below
        if body.get(name) is not None and not _is_int(body[name]):
            raise _malformed(name, body[name], "an integer")
    constraint = body.get("structured_outputs")
    if constraint is not None and not isinstance(constraint, dict):
        raise _malformed("structured_outputs", constraint, "an object")
    for name in _CONSTRAINTS:
        size = len(json.dumps(body[name])) if name in body else 0
        if size > MAX_CONSTRAINT_BYTES:
            raise _beyond(name, f"{size} bytes", MAX_CONSTRAINT_BYTES)
    if isinstance(constraint, dict):
        _check_text("structured_outputs.json", constraint.get("json"))
    is_named = isinstance(body.get("tool_choice"), dict)
    for tool in _dicts(body.get("tools")) if is_named and "messages" in body else ():
        if not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            raise _malformed("tools", tool, "functions that have a name")
    for item in _dicts(body.get("input")):
        if item.get("type") == "item_reference":
            raise _malformed("input", item, "the items themselves instead of references")
    for message in _dicts(body.get("messages")):
        for call in _dicts(message.get("tool_calls")):
            for function in _dicts([call.get("function")]):
                _check_text("messages", function.get("arguments"))


def _check_numbers(param: str, value: Any) -> None:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            _check_numbers(param, child)
    elif isinstance(value, int | float) and not -(2**63) <= value < 2**64:
        raise _malformed(param, value, "numbers that 64 bits can hold")


def _check_text(param: str, value: Any) -> None:
    """`value`, if it is JSON text, is not nested too deeply for Python."""
    try:
        json.loads(value)
    except RecursionError:
        raise _malformed(param, value, f"JSON nested at most {MAX_NESTING} deep") from None
    except (TypeError, ValueError):
        pass


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _malformed(param: str, value: Any, expected: str) -> Refusal:
    message = f"{param} has value {str(value)[:200]!r}: expected {expected}"
    return Refusal(400, message, "malformed", param)


def check_sizes(body: dict[str, Any], limits: RequestLimits) -> bool:
    """Hold the request to the operator's limits. Whether `body` was changed.

    What has the wrong type is left to `check_shapes` and to vLLM's own validation.

    Raises:
        Refusal: Names the field.
    """
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if is_batch and isinstance(prompt, list) else 1
    n = body["n"] if _is_int(body.get("n")) else 1
    choices = num_prompts * n
    if choices > limits.max_choices:
        param, value = ("prompt", num_prompts) if num_prompts > 1 else ("n", n)
        raise _beyond(param, f"{value} (prompts times n is {choices})", limits.max_choices)
    if _is_int(body.get("best_of")) and body["best_of"] > limits.max_choices:
        raise _beyond("best_of", str(body["best_of"]), limits.max_choices)
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > limits.max_stop_strings:
        raise _beyond("stop", f"{len(stop)} strings", limits.max_stop_strings)
    if limits.max_output_tokens is None:
        return False
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    given = [name for name in names if body.get(name) is not None]
    for name in given:
        if _is_int(body[name]) and body[name] > limits.max_output_tokens:
            raise _beyond(name, str(body[name]), limits.max_output_tokens)
    if not given:
        body["max_output_tokens" if "input" in body else "max_tokens"] = limits.max_output_tokens
    return not given


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _beyond(param: str, value: str, limit: int) -> Refusal:
    message = f"{param} has value {value[:200]}: this server allows at most {limit}"
    return Refusal(400, message, "limit", param)
