# SPDX-License-Identifier: Apache-2.0
"""An answer of vLLM's on its way out: with the report in it, and with its true status."""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from server.record import RequestRecord
from server.refusal import Refusal, bounded

_ERROR_EVENT = b'data: {"error":'
_EARLY_EVENTS = (b"event: response.created\n", b"event: response.in_progress\n")
_LAST_RESPONSE_EVENTS = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)
_DONE = b"data: [DONE]\n"


class Answer:
    """The `send` that vLLM's app is given for one request.

    Adds ``X-Request-Id`` to every answer and ``kv_cache`` to those of generation: to the object
    of a whole answer, to the last usage chunk of a stream, to the ``response`` of a Responses
    stream's last event. A stream whose first event is an error becomes that error, with its
    status; what a Responses stream says before the engine has taken the request is held back for
    that. Error messages are bounded. Everything else passes as it is, event by event.

    Attributes:
        is_begun: Something was sent, so that the status can no longer change.
    """

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self._send = send
        self._record = record
        self._start: Message | None = None  # held back until the first of the body is seen
        self._is_stream = False
        self._is_ended = False  # the stream's last event is out
        self._early = b""
        self._parts: list[bytes] | None = None  # of an answer that is seen as a whole
        self.is_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._take_start(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._parts is not None:
            await self._take_part(message)
        elif self._is_stream:
            await self._take_events(message)
        else:
            await self._pass(message)

    async def break_off(self, refusal: Refusal) -> None:
        """End a stream that was begun: with the refusal as an event, unless it has had its last."""
        if self._is_stream and not self._record.is_answered:
            body = b"data: " + refusal.body() + b"\n\ndata: [DONE]\n\n"
            end = b"" if self._is_ended else body
            await self._pass({"type": "http.response.body", "body": end})

    async def _pass(self, message: Message) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
            self.is_begun = True
        await self._send(message)
        self._record.is_answered |= not message.get("more_body", False)

    async def _take_start(self, message: Message) -> None:
        headers = MutableHeaders(raw=message["headers"])
        headers["X-Request-Id"] = self._record.request_id
        self._record.status = message["status"]
        self._start = message
        content_type = headers.get("content-type", "")
        is_json = content_type.startswith("application/json")
        if content_type.startswith("text/event-stream"):
            self._is_stream = True
        elif is_json and (self._record.is_generation or message["status"] >= 400):
            self._parts = []

    async def _take_part(self, message: Message) -> None:
        assert self._parts is not None
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._parts)
        if self._record.status is not None and self._record.status >= 400:
            body = self._error(body)
        elif (report := self._record.report()) is not None and body.endswith(b"}"):
            body = _with_report(body, report)
        assert self._start is not None
        MutableHeaders(raw=self._start["headers"])["Content-Length"] = str(len(body))
        await self._pass({"type": "http.response.body", "body": body})

    async def _take_events(self, message: Message) -> None:
        chunk = message.get("body", b"")
        if chunk.startswith(_ERROR_EVENT):
            self._record.had_error = True
            if self._start is not None:
                await self._become_error(chunk)
                return
        if self._start is not None and chunk.startswith(_EARLY_EVENTS):
            self._early += chunk
        elif self._start is None or chunk or not message.get("more_body", False):
            body, self._early = self._early + self._with_report_in_stream(chunk), b""
            await self._pass({**message, "body": body})
            self._is_ended |= chunk.startswith((_DONE, *_LAST_RESPONSE_EVENTS))

    async def _become_error(self, event: bytes) -> None:
        """Nothing was sent: the stream's first event is an error, so it is the answer."""
        self._is_stream = False
        error = json.loads(event.split(b"\n\n", 1)[0].removeprefix(b"data: "))
        status = int(error["error"].get("code") or 500)
        self._record.status = status
        body = self._error(json.dumps(error).encode())
        self._record.had_error = status >= 500
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self._record.request_id.encode()),
        ]
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        await self._pass({"type": "http.response.body", "body": body})
        self._send = _nowhere  # the rest of the stream says that it is done

    def _error(self, body: bytes) -> bytes:
        """`body`, an error, with a message of bounded length."""
        try:
            value = json.loads(body)
            error = value["error"]
            self._record.error_param = error["param"]
            error["message"] = bounded(error["message"])
        except (ValueError, KeyError, TypeError):
            return body
        return json.dumps(value).encode()

    def _with_report_in_stream(self, chunk: bytes) -> bytes:
        if self._record.path.endswith("/responses"):
            return self._with_report_in_response(chunk)
        # In JSON text quotes are escaped: this can only be the empty list of choices itself.
        if b'"choices":[]' not in chunk or b'"usage":' not in chunk:
            return chunk
        report = self._record.report()
        event, end, rest = chunk.partition(b"}\n\n")
        if report is None or not end:
            return chunk
        return _with_report(event + b"}", report) + b"\n\n" + rest

    def _with_report_in_response(self, chunk: bytes) -> bytes:
        if not chunk.startswith(_LAST_RESPONSE_EVENTS):
            return chunk
        name, _, rest = chunk.partition(b"\n")
        report = self._record.report()
        if report is None:
            return chunk
        event = json.loads(rest.strip().removeprefix(b"data: "))
        event["response"]["kv_cache"] = report
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return name + b"\ndata: " + data.encode() + b"\n\n"


async def _nowhere(_: Message) -> None:
    pass


def _with_report(body: bytes, report: dict[str, Any]) -> bytes:
    return body[:-1] + b',"kv_cache":' + json.dumps(report, separators=(",", ":")).encode() + b"}"
