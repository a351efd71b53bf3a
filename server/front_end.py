# SPDX-License-Identifier: Apache-2.0
"""The outermost ASGI layer around vLLM's FastAPI app: who gets in, with what, and what comes out.

vLLM's own routers answer. vLLM loads this class in every API server process (``--middleware``).
It is plain ASGI, so that a client's disconnect reaches vLLM's handlers.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from contextlib import suppress

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from server.answer import Answer
from server.body import parse_json, read_body, replayed
from server.override import HEADER, take_override
from server.record import RequestRecord, current, write_line
from server.refusal import Refusal
from server.request_limits import check_shapes, check_sizes
from server.service import Service

GENERATION = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
TOKENIZATION = frozenset({"/tokenize", "/detokenize"})
LIVENESS = "/live"
READINESS = frozenset({"/ready", "/health"})
METRICS = "/metrics"
ROUTES = frozenset(
    {
        *GENERATION,
        *TOKENIZATION,
        LIVENESS,
        *READINESS,
        METRICS,
        "/",
        "/openapi.json",
        "/v1/kv_cache/policy",
        "/v1/kv_cache/retention",
        "/v1/models",
        "/version",
    }
)
"""What is served; every other route of vLLM's needs --allow-route."""
_RESPONSE_ROUTE = re.compile(r"/v1/responses/[^/]+(/cancel)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_LAST_WORD_SECONDS = 1
_NOT_LOGGED = frozenset({LIVENESS, *READINESS, METRICS})


class FrontEnd:
    """ASGI app around `app`, which is vLLM's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._service: Service | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with Service.of(scope["app"]) as self._service:
                await self._app(scope, receive, send)
        elif scope["type"] == "http":
            assert self._service is not None
            await self._serve(self._service, scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": "not served here"})

    async def _serve(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        record = RequestRecord(
            request_id=uuid.uuid4().hex,
            method=scope["method"],
            path=path if len(path) <= 200 else f"{path[:200]}…",
            is_generation=path in GENERATION and scope["method"] == "POST",
            task=asyncio.current_task(),
        )
        answer = Answer(send, record)
        try:
            _take_request_id(record, headers)
            _check_access(service, scope, path, headers)
            if record.is_generation:
                service.admit(record)
                receive = await self._take_body(service, record, headers, receive)
            elif scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                body = await read_body(receive, headers, service.max_body_bytes)
                if path in TOKENIZATION:
                    parse_json(body, headers.get("content-type", ""))
                receive = replayed(body, receive)
            current.set(record)
            await self._app(_with_request_id(scope, record), receive, answer)
        except Refusal as refusal:
            record.was_refused = True
            service.count_refusal(refusal)
            await _answer_refusal(refusal, answer)
        except ConnectionAbortedError:
            pass  # gone before its body was read
        except asyncio.CancelledError:
            if not service.has_given_up:
                raise
            record.had_error = True
            with suppress(TimeoutError):  # of a client that does not read
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    if answer.is_begun:
                        await answer.break_off(service.too_late())
                    else:
                        await _answer_refusal(service.too_late(), answer)
        except Exception as error:  # out of a stream: vLLM's own handlers take the others
            if answer.is_begun:
                raise
            found = create_error_response(_cause(error)).error
            await _answer_refusal(Refusal(found.code, found.message, "", found.param), answer)
            if found.code >= 500:
                raise
        finally:
            service.release(record)
            if record.is_generation and record.status != 401:
                service.count(record)
            if path not in _NOT_LOGGED and service.has_access_log:
                write_line(record.log_line())

    async def _take_body(
        self, service: Service, record: RequestRecord, headers: dict[str, str], receive: Receive
    ) -> Receive:
        raw = await read_body(receive, headers, service.max_body_bytes)
        body = parse_json(raw, headers.get("content-type", ""))
        is_changed = check_sizes(body, service.limits)
        check_shapes(body)
        if service.policy is not None:
            record.asked_policy, is_moved = take_override(body, headers.get(HEADER), service.policy)
            is_changed |= is_moved
        if record.path == "/v1/responses" and "request_id" not in body:
            body["request_id"] = f"resp_{record.request_id}"
            is_changed = True
        return replayed(json.dumps(body).encode() if is_changed else raw, receive)


def _take_request_id(record: RequestRecord, headers: dict[str, str]) -> None:
    given = headers.get("x-request-id")
    if given is None:
        return
    if not _REQUEST_ID.fullmatch(given):
        raise Refusal(
            400,
            f"X-Request-Id has value {given[:64]!r} ({len(given)} characters): expected 1 to 128 "
            "letters, digits or any of . _ : @ / + = -",
            "malformed",
            "X-Request-Id",
        )
    record.request_id = given


def _with_request_id(scope: Scope, record: RequestRecord) -> Scope:
    """`scope` with the id in its headers, where vLLM takes a request's identity from."""
    headers = [header for header in scope["headers"] if header[0] != b"x-request-id"]
    return {**scope, "headers": [*headers, (b"x-request-id", record.request_id.encode())]}


def _check_access(service: Service, scope: Scope, path: str, headers: dict[str, str]) -> None:
    """Raises Refusal unless this request may go on."""
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    size += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if size > service.max_header_bytes:
        message = f"headers and URL have {size} bytes: expected at most {service.max_header_bytes}"
        raise Refusal(431, message, "too_large", headers={"Connection": "close"})
    if path == LIVENESS or (path in READINESS and service.is_readiness_open):
        return
    if path == METRICS:
        service.check_metrics_access(headers.get("authorization"))
        return
    if not service.keys.admits(headers.get("authorization")):
        challenge = 'Basic realm="RandKV", charset="UTF-8"' if path == "/" else "Bearer"
        message = "no valid API key: expected the header Authorization: Bearer KEY"
        raise Refusal(401, message, "authentication", headers={"WWW-Authenticate": challenge})
    if path not in ROUTES and path not in service.more_routes:
        if _RESPONSE_ROUTE.fullmatch(path):
            return
        raise Refusal(404, f"{path[:200]} is not served here", "route")


def _cause(error: Exception) -> Exception:
    """`error`, or what it was when Starlette found that the answer had been started."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


async def _answer_refusal(refusal: Refusal, answer: Answer) -> None:
    body = refusal.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in refusal.headers.items()),
    ]
    await answer({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await answer({"type": "http.response.body", "body": body})
