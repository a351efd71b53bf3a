# SPDX-License-Identifier: Apache-2.0
"""A request for generation on its way in: its body is read, checked, and given to vLLM."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive

from randkv.config import EnginePolicy
from randkv.errors import RandKVConfigError
from server.refusal import Refusal

FIELD = "kv_cache_policy"
HEADER = "x-kv-cache-policy"
MAX_NESTING = 64
_DRAINED = 4
"""Times the limit that is read of a body, and dropped: who is cut off while sending sees no 413."""
MAX_CONSTRAINT_BYTES = 64 * 2**10
"""Of a schema, regular expression, grammar or list of choices. The engine compiles these one after
another, for as long as it takes, and a megabyte takes more than a minute."""
_INTEGERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens")
_CONSTRAINTS = ("response_format", "structured_outputs", "text")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may hold; see the options of the same names."""

    max_body_bytes: int
    max_choices: int
    max_stop_strings: int
    max_output_tokens: int | None

    @classmethod
    def of(cls, args: Namespace) -> BodyLimits:
        return cls(
            args.max_body_bytes, args.max_choices, args.max_stop_strings, args.max_output_tokens
        )


async def read_body(receive: Receive, headers: dict[str, str], limits: BodyLimits) -> bytes:
    """The whole body.

    Raises:
        Refusal: Too large, or encoded in a way that is not read here.
        ConnectionAbortedError: The client went away.
    """
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "Content-Encoding: expected none; send the body as it is", "malformed")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > _DRAINED * limits.max_body_bytes:
        raise _too_large(length, limits)
    parts: list[bytes] = []
    size, is_last = 0, False
    while not is_last:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        part = message.get("body", b"")
        size += len(part)
        if size <= limits.max_body_bytes:
            parts.append(part)
        elif size > _DRAINED * limits.max_body_bytes:
            break
        is_last = not message.get("more_body", False)
    if size > limits.max_body_bytes:
        raise _too_large(str(size) if is_last else f"more than {size}", limits)
    return b"".join(parts)


def _too_large(size: str, limits: BodyLimits) -> Refusal:
    expected = f"the body has {size} bytes: expected at most {limits.max_body_bytes}"
    return Refusal(413, expected, "too_large", headers={"Connection": "close"})


def parse_json(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object that the body holds.

    Raises:
        Refusal: Another content type, not UTF-8, not JSON, not an object, NaN or Infinity, text
            that UTF-8 cannot encode, or nested too deeply.
    """
    media_type = content_type.split(";", 1)[0].strip().lower()
    if media_type != "application/json":
        shown = f"{content_type[:80]!r}" if content_type else "missing"
        raise Refusal(415, f"Content-Type is {shown}: expected application/json", "malformed")
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
        _check_nesting(value)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise Refusal(400, _not_json("nested too deeply"), "malformed") from None
    except UnicodeError as error:
        raise Refusal(400, _not_json(f"not UTF-8: {error}"[:200]), "malformed") from None
    except ValueError as error:
        raise Refusal(400, _not_json(str(error)), "malformed") from None
    return value


def _not_json(problem: str) -> str:
    return f"the body is not a JSON object: {problem}"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _check_nesting(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(f"nested more than {MAX_NESTING} deep")
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]


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


def check_sizes(body: dict[str, Any], limits: BodyLimits) -> bool:
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


def take_override(
    body: dict[str, Any], header: str | None, policy: EnginePolicy
) -> tuple[str | None, bool]:
    """Move the request's ``kv_cache_policy`` to where vLLM carries it, once it is known to be good.

    It may be in the body, in the header or, as in vLLM's own convention, in ``vllm_xargs``.
    Mutates `body`.

    Returns:
        The type that the request asks for, or the default's; and whether `body` was changed.

    Raises:
        Refusal: The override is bad or outside the limits, or two places disagree.
    """
    xargs = body.get("vllm_xargs")
    given = [body[FIELD]] if body.get(FIELD) is not None else []
    if header is not None:
        given.append(header)
    if isinstance(xargs, dict) and xargs.get(FIELD) is not None:
        given.append(xargs[FIELD])
    try:
        parsed = [policy.parse_override(value) for value in given]
        if any(one != parsed[0] for one in parsed):
            raise RandKVConfigError(
                FIELD,
                given,
                "the same value in the body, the header X-KV-Cache-Policy and vllm_xargs",
                "Give it in one place.",
                "conflict",
            )
        config = parsed[0][0] if parsed else policy.default
    except RandKVConfigError as error:
        raise Refusal.of(error) from None
    kind = "dense" if config is None else "randkv"
    is_changed = FIELD in body
    body.pop(FIELD, None)
    if given and (xargs is None or isinstance(xargs, dict)):
        value = given[0]
        text = value if isinstance(value, str) else json.dumps(value)
        body["vllm_xargs"] = {**(xargs or {}), FIELD: text}
        is_changed = True
    return kind, is_changed


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` as if `body` had just arrived; afterwards the connection's own messages."""
    is_sent = False

    async def receive_again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
