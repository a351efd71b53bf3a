# SPDX-License-Identifier: Apache-2.0
"""The body of a request: read once, as JSON, and given to vLLM as if it had just arrived."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message, Receive

from server.refusal import Refusal

MAX_NESTING = 64
MAX_SECONDS_BETWEEN_PARTS = 60
_DRAINED = 4
"""Times the limit that is read of a body, and dropped: who is cut off while sending sees no 413."""


async def read_body(receive: Receive, headers: dict[str, str], max_body_bytes: int) -> bytes:
    """The whole body.

    Raises:
        Refusal: Too large, too slow, or encoded in a way that is not read here.
        ConnectionAbortedError: The client went away.
    """
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "Content-Encoding: expected none; send the body as it is", "malformed")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > _DRAINED * max_body_bytes:
        raise _too_large(length, max_body_bytes)
    parts: list[bytes] = []
    size, is_last = 0, False
    while not is_last:
        try:
            async with asyncio.timeout(MAX_SECONDS_BETWEEN_PARTS):
                message = await receive()
        except TimeoutError:
            raise Refusal(
                408,
                f"nothing of the body came for {MAX_SECONDS_BETWEEN_PARTS} s",
                "malformed",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        part = message.get("body", b"")
        size += len(part)
        if size <= max_body_bytes:
            parts.append(part)
        elif size > _DRAINED * max_body_bytes:
            break
        is_last = not message.get("more_body", False)
    if size > max_body_bytes:
        raise _too_large(str(size) if is_last else f"more than {size}", max_body_bytes)
    return b"".join(parts)


def _too_large(size: str, max_body_bytes: int) -> Refusal:
    expected = f"the body has {size} bytes: expected at most {max_body_bytes}"
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
