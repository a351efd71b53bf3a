# SPDX-License-Identifier: Apache-2.0
"""Behaviour under fire: clients that leave, signals, a dead engine, a killed server."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests.server.process import (
    REPOSITORY,
    Reply,
    Server,
    chat,
    free_port,
    is_alive,
    serve,
    wait_until,
)

LONG = {"max_tokens": 6000, "ignore_eos": True}


def open_stream(server: Server, **fields: object) -> http.client.HTTPResponse:
    """A stream of which the first bytes have come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps(chat(stream=True, **{**LONG, **fields}))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read1(20)
    return answer


def raw_request(request_id: str, **fields: object) -> bytes:
    """A chat completion request as it is on the wire."""
    body = json.dumps(chat(**{**LONG, **fields})).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def hang_up(server: Server, request_id: str, **fields: object) -> None:
    """Ask, wait until the engine works on it, and go without an answer."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(raw_request(request_id, **fields))
        wait_until(lambda: server.running() > 0, 20, "the request runs")


def test_a_client_that_leaves_a_stream_frees_the_engine_within_a_second(server: Server) -> None:
    seconds = []
    for _ in range(3):
        answer = open_stream(server)
        wait_until(lambda: server.running() == 1, 20, "the request runs")
        answer.close()
        seconds.append(wait_until(lambda: server.running() == 0, 20, "no request runs"))
    assert median(seconds) < 1  # the machine may stall once


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}], ids=["one", "three"])
def test_a_client_that_does_not_wait_for_its_answer_does_too(
    server: Server, fields: dict[str, object]
) -> None:
    aborted = server.metrics().total("randkv_requests_total", outcome="abort")
    seconds = []
    for attempt in range(3):
        request_id = f"hang-up-{len(fields)}-{attempt}"
        hang_up(server, request_id, **fields)
        seconds.append(wait_until(lambda: server.running() == 0, 20, "no request runs"))
        assert server.logged(request_id)["outcome"] == "abort"
    assert median(seconds) < 1
    after = server.metrics()  # counted before it is logged
    assert after.total("randkv_requests_total", outcome="abort") == aborted + 3
    wait_until(lambda: server.metrics().total("randkv_running_requests") == 0, 1, "none runs")


def test_a_client_that_leaves_before_its_body_is_read_changes_nothing(server: Server) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())
        time.sleep(0.1)
    assert server.chat().status == 200


def test_sigterm_drains_refuses_new_requests_and_exits_with_0(
    small_model: list[str], tmp_path: Path
) -> None:
    with serve(tmp_path, *small_model, "--shutdown-timeout", "120") as server:
        pids = server.engine_pids()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.chat, max_tokens=1500, ignore_eos=True)
            wait_until(lambda: server.running() == 1, 20, "the request runs")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/ready").status == 503, 2, "not ready")
            assert server.metrics().total("randkv_ready") == 0
            refused = server.chat()
            assert server.get("/live").status == 200
            answered: Reply = running.result()
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert answered.status == 200
        assert answered.json["usage"]["completion_tokens"] == 1500
        assert server.process.wait(timeout=60) == 0
        wait_until(lambda: not any(map(is_alive, pids)), 10, "no engine process is left")


def ask_and_not_read(server: Server) -> socket.socket:
    """A stream of 8 samples, about 2 KB a token of each, into a small buffer."""
    fields = {"n": 8, "temperature": 1, "logprobs": True, "top_logprobs": 20}
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", server.port))
    one.sendall(raw_request("unread", stream=True, **fields))
    return one


def test_what_does_not_end_in_time_is_cut_off(small_model: list[str], tmp_path: Path) -> None:
    """A client that does not read holds nothing up."""
    with serve(tmp_path, *small_model, "--shutdown-timeout", "1") as server:
        counter = "vllm:generation_tokens_total"
        with concurrent.futures.ThreadPoolExecutor(1) as pool, ask_and_not_read(server):
            wait_until(lambda: server.metrics().total(counter) > 2000, 60, "its buffers are full")
            running = pool.submit(server.chat, n=8, temperature=1, **LONG)
            stream = open_stream(server)
            wait_until(lambda: server.running() == 17, 20, "the requests run")
            server.process.send_signal(signal.SIGTERM)
            assert running.result().status == 503
            *_, error, done = stream.read().split(b"\n\n")[:-1]  # a whole body, with an end
            assert server.process.wait(timeout=30) == 0
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
        assert done == b"data: [DONE]"


def test_a_dead_engine_fails_readiness_and_ends_the_server_with_an_error(
    small_model: list[str], tmp_path: Path
) -> None:
    with serve(tmp_path, *small_model, "--kv-cache-policy", "dense") as server:
        assert server.get("/ready").status == server.get("/health").status == 200
        stream = open_stream(server)
        began = time.monotonic()
        for pid in server.engine_pids():
            if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)

        def fails(path: str) -> bool:
            try:
                return server.get(path).status == 503
            except OSError:  # it has ended already
                return True

        wait_until(lambda: fails("/health") and fails("/ready"), 5, "health fails")
        assert b'"error"' in stream.read()  # the open stream is told, not left hanging
        assert server.process.wait(timeout=30) not in (0, None)
        assert time.monotonic() - began < 30


def test_a_killed_server_leaves_no_engine_behind(small_model: list[str], tmp_path: Path) -> None:
    with serve(tmp_path, *small_model) as server:
        pids = server.engine_pids()
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
        assert any("EngineCore" in name for name in names)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(map(is_alive, pids)), 10, "no engine process is left")


def test_sigterm_ends_a_server_that_is_still_starting(
    small_model: list[str], tmp_path: Path
) -> None:
    def engines() -> list[int]:
        return [pid for pid in server.engine_pids() if b"EngineCore" in cmdline(pid)]

    def cmdline(pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "--port", str(free_port()), *small_model],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, 0, tmp_path / "log")
    try:
        wait_until(engines, 120, "an engine process")
        below = server.engine_pids()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_alive, below)), 20, "the end of what it started")
