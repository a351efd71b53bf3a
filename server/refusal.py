# SPDX-License-Identifier: Apache-2.0
"""A request that is answered without the engine, in OpenAI's error shape."""

from __future__ import annotations

import json
from typing import Any

from randkv.errors import RandKVConfigError, RefusalReason

_TYPES = {
    401: "AuthenticationError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
MAX_MESSAGE_LEN = 2000


class Refusal(Exception):  # noqa: N818 - an answer rather than an error of ours
    """What to answer.

    Attributes:
        status: HTTP status.
        message: What was wrong, what was expected and what to do.
        reason: Value of the `reason` label of ``randkv_refused_requests``.
        param: Path of the field.
        headers: Sent with the answer.
        policy_reason: Set when a kv_cache_policy was refused; then it is counted instead.
    """

    def __init__(
        self,
        status: int,
        message: str,
        reason: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        policy_reason: RefusalReason | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.param = param
        self.headers = headers or {}
        self.policy_reason = policy_reason

    @classmethod
    def of(cls, error: RandKVConfigError) -> Refusal:
        """The answer to a kv_cache_policy that cannot be used."""
        return cls(400, str(error), "malformed", param=error.field, policy_reason=error.reason)

    def body(self) -> bytes:
        return json.dumps(error_body(self.status, self.message, self.param)).encode()


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, as vLLM's own errors are."""
    return {
        "error": {
            "message": bounded(message),
            "type": _TYPES.get(status, "BadRequestError"),
            "param": param,
            "code": status,
        }
    }


def bounded(message: str) -> str:
    """`message`, cut: validation errors quote the input, which may be megabytes."""
    if len(message) <= MAX_MESSAGE_LEN:
        return message
    return f"{message[:MAX_MESSAGE_LEN]}… ({len(message)} characters)"
