# SPDX-License-Identifier: Apache-2.0
"""The ``kv_cache_policy`` of a request, wherever the client put it."""

from __future__ import annotations

import json
from typing import Any

from randkv.config import EnginePolicy
from randkv.errors import RandKVConfigError
from server.refusal import Refusal

FIELD = "kv_cache_policy"
HEADER = "x-kv-cache-policy"


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
