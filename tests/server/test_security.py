# SPDX-License-Identifier: Apache-2.0
"""Who gets in: API keys, the metrics' token, routes, limits, back-pressure."""

from __future__ import annotations

import base64
import concurrent.futures
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from server.api_keys import ApiKeys
from tests.server.process import Server, serve

FROM_FILE, FROM_OPTION, FROM_ENVIRONMENT = "key-from-file", "key-from-option", "key-from-env"
TOKEN = "metrics-token"
BEARER = {"Authorization": f"Bearer {FROM_FILE}"}
POLICY = '{"type": "randkv", "budget": 64, "buffer_size": 16}'
LIMITS = '{"budget": [32, 128], "long_prompt": "dense"}'


class Guarded(NamedTuple):
    """A server with keys, and the file that some of them are in."""

    server: Server
    keys: Path


@pytest.fixture(scope="module")
def guarded(small_model: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    keys, token = directory / "keys", directory / "token"
    keys.write_text(f"# operators\n{FROM_FILE}\n\n")
    token.write_text(f"{TOKEN}\n")
    with serve(
        directory,
        *small_model,
        *("--kv-cache-policy", POLICY, "--kv-cache-policy-limits", LIMITS),
        *("--api-key", FROM_OPTION, "--api-keys-file", str(keys)),
        *("--metrics-token-file", str(token)),
        *("--max-inflight-requests", "2", "--max-body-bytes", "20000", "--max-choices", "4"),
        *("--max-stop-strings", "2", "--max-output-tokens", "3000"),
        environment={"RANDKV_API_KEYS": f"{FROM_ENVIRONMENT},", "VLLM_SERVER_DEV_MODE": "1"},
    ) as server:
        yield Guarded(server, keys)


@pytest.fixture
def closed(guarded: Guarded) -> Server:
    return guarded.server


@pytest.mark.parametrize("key", [FROM_FILE, FROM_OPTION, FROM_ENVIRONMENT])
def test_a_key_from_anywhere_opens(closed: Server, key: str) -> None:
    assert closed.get("/v1/models", Authorization=f"Bearer {key}").status == 200
    basic = base64.b64encode(f"anyone:{key}".encode()).decode()
    assert closed.get("/", Authorization=f"Basic {basic}").status == 200


@pytest.mark.parametrize(
    "value",
    [None, "", "Bearer", "Bearer ", "Bearer no", f"Bearer {FROM_FILE}x", FROM_FILE, "Basic %%%"],
)
def test_anything_else_does_not(closed: Server, value: str | None) -> None:
    headers = {} if value is None else {"Authorization": value}
    reply = closed.send("GET", "/v1/models", headers=headers)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.error["type"] == "AuthenticationError"


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/ready",
        "/health",
        "/metrics",
        "/metrics/",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/responses/abc/cancel",
        "/v1/kv_cache/policy",
        "/openapi.json",
        "/docs",
        "/tokenize",
        "/invocations",
        "/ping",
        "/server_info",
        "/reset_prefix_cache",
        "/sleep",
        "/collective_rpc",
        "/%2e%2e/v1/models",
        "//v1/models",
    ],
)
def test_without_a_key_only_liveness_is_reachable(closed: Server, path: str, method: str) -> None:
    assert closed.send(method, path).status == 401
    assert closed.send("GET", "/live").status == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/invocations", "/ping", "/server_info", "/reset_prefix_cache", "/sleep", "/pause"),
        *("/collective_rpc", "/load", "/v1/load_lora_adapter", "/inference/v1/generate"),
        *("/metrics/x", "/docs"),
    ],
)
def test_other_routes_of_vllm_are_not_served_even_with_a_key(closed: Server, path: str) -> None:
    for method in ("GET", "POST"):
        reply = closed.send(method, path, headers=BEARER)
        assert reply.status == 404
        assert "is not served here" in reply.error["message"]


def test_metrics_take_their_own_token_only(closed: Server) -> None:
    assert closed.send("GET", "/metrics", headers=BEARER).status == 401
    assert closed.get("/metrics", Authorization=f"Bearer {TOKEN}").status == 200
    assert closed.get("/v1/models", Authorization=f"Bearer {TOKEN}").status == 401


def test_keys_are_read_again_when_the_file_changes(guarded: Guarded) -> None:
    before = guarded.keys.read_text()

    def opens(key: str) -> bool:
        return guarded.server.get("/v1/models", Authorization=f"Bearer {key}").status == 200

    try:
        guarded.keys.write_text("rotated\n")
        time.sleep(1.2)
        assert opens("rotated")
        assert not opens(FROM_FILE)
        assert opens(FROM_OPTION)
        guarded.keys.write_text("# nothing is left\n")
        time.sleep(1.2)
        assert opens("rotated")  # an accident does not lock everyone out, nor let everyone in
        assert not opens("anything")
    finally:
        guarded.keys.write_text(before)
        time.sleep(1.2)


def test_a_file_without_a_key_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys([], path)


def test_keys_that_cannot_be_read_any_more_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    keys = ApiKeys([], path)
    os.remove(path)
    keys._looked = 0.0
    assert keys.admits("Bearer one")
    assert not keys.admits("Bearer two")


def test_neither_keys_nor_content_are_in_the_log(closed: Server) -> None:
    secret = "xylophone quartz"
    body = {"prompt": secret, "max_tokens": 2}
    assert closed.post("/v1/completions", body, BEARER).status == 200
    assert closed.post("/v1/completions", {**body, "temperature": "x"}, BEARER).status == 400
    for text in (FROM_FILE, FROM_OPTION, FROM_ENVIRONMENT, TOKEN, "xylophone", "quartz"):
        assert text not in closed.printed


def test_cors_is_closed(closed: Server) -> None:
    headers = {**BEARER, "Origin": "https://elsewhere.example"}
    reply = closed.send("GET", "/v1/models", headers=headers)
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"n": 5}, "n", 4),
        ({"n": 10**30}, "n", 4),
        ({"prompt": ["a"] * 3, "n": 2}, "prompt", 4),
        ({"prompt": ["a"] * 5}, "prompt", 4),
        ({"stop": ["a", "b", "c"]}, "stop", 2),
        ({"max_tokens": 3001}, "max_tokens", 3000),
        ({"max_tokens": 10**30}, "max_tokens", 3000),
    ],
)
def test_limits_name_the_field_and_the_most(
    closed: Server, fields: dict[str, object], param: str, limit: int
) -> None:
    reply = closed.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **fields}, BEARER)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert f"at most {limit}" in reply.error["message"]


def test_a_request_that_names_no_output_length_gets_the_limit(closed: Server) -> None:
    body = {"prompt": "a", "ignore_eos": True, "kv_cache_policy": "randkv"}
    reply = closed.post("/v1/completions", body, BEARER)
    assert reply.json["usage"]["completion_tokens"] == 3000
    assert reply.json["kv_cache"]["physical_tokens"] <= 64 + 2 * 16


def test_a_large_body_is_a_413_whether_announced_or_not(closed: Server) -> None:
    body = {"prompt": "a" * 30000, "max_tokens": 2}
    reply = closed.post("/v1/completions", body, BEARER)
    assert reply.status == 413
    assert "at most 20000" in reply.error["message"]


def test_other_bodies_are_bounded_and_checked_too(closed: Server) -> None:
    assert closed.post("/tokenize", {"prompt": "a" * 30000}, BEARER).status == 413
    nested = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    for path in ("/tokenize", "/detokenize"):
        assert closed.post(path, nested, BEARER).status == 400
        assert closed.post(path, b"[1]", BEARER).status == 400


def test_large_headers_are_a_431(closed: Server) -> None:
    reply = closed.send("GET", "/v1/models", headers={**BEARER, "X-Padding": "a" * 40000})
    assert reply.status == 431


def test_a_value_outside_the_operators_limits_is_refused(closed: Server) -> None:
    for budget in (31, 129):
        body = {
            "prompt": "a",
            "max_tokens": 2,
            "kv_cache_policy": {"type": "randkv", "budget": budget},
        }
        reply = closed.post("/v1/completions", body, BEARER)
        assert reply.status == 400
        assert reply.error["param"] == "kv_cache_policy.budget"
        assert "an integer from 32 to 128" in reply.error["message"]


def test_a_long_prompt_is_served_dense_and_said_so_where_the_operator_allows_it(
    closed: Server,
) -> None:
    body = {"prompt": "one two three " * 40, "max_tokens": 30, "ignore_eos": True}
    report = closed.post("/v1/completions", body, BEARER).json["kv_cache"]
    assert report["policy"] == "dense"
    assert report["long_prompt"] is True
    assert report["evicted_tokens"] == 0
    short = closed.post("/v1/completions", {**body, "prompt": "one"}, BEARER).json["kv_cache"]
    assert (short["policy"], short["long_prompt"]) == ("randkv", False)


def test_too_many_requests_at_once_are_told_to_come_back(closed: Server) -> None:
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        replies = [pool.submit(closed.post, "/v1/completions", body, BEARER) for _ in range(5)]
        found = sorted(reply.result().status for reply in replies)
    assert found == [200, 200, 429, 429, 429]
    refused = next(reply.result() for reply in replies if reply.result().status == 429)
    assert int(refused.headers["retry-after"]) > 0
    assert "the most this server takes" in refused.error["message"]
    metrics = closed.metrics({"Authorization": f"Bearer {TOKEN}"})
    assert metrics.total("randkv_refused_requests_total", reason="overload") == 3
