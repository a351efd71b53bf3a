# SPDX-License-Identifier: Apache-2.0
"""A real server in a process of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

REPOSITORY = Path(__file__).parents[2]
PROMPT = "Count from one to one hundred."


class Reply(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Of a stream: the JSON of each event; ``[DONE]`` is left out."""
        lines = self.body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(text) for text in data if text != "[DONE]"]


class Server:
    """A running ``python -m server``.

    Attributes:
        seconds: From start to the first answer.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.seconds = 0.0

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def access_log(self) -> list[dict[str, Any]]:
        lines = [line for line in self.printed.splitlines() if line.startswith('{"time"')]
        return [json.loads(line) for line in lines]

    def logged(self, request_id: str) -> dict[str, Any]:
        """The access log's line of a request, which may have just ended."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for line in self.access_log():
                if line["id"] == request_id:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no line for {request_id}")

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, named, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(
            "POST", path, data, {"Content-Type": "application/json", **(headers or {})}
        )

    def chat(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        return self.post("/v1/chat/completions", chat(**fields), headers)

    def metrics(self, headers: Mapping[str, str] | None = None) -> Metrics:
        reply = self.send("GET", "/metrics", headers=headers)
        assert reply.status == 200, reply.body[:300]
        return Metrics(reply.body.decode())

    def running(self) -> int:
        """Requests in the engine, waiting ones included."""
        metrics = self.metrics()
        waiting = metrics.total("vllm:num_requests_waiting")
        return int(metrics.total("vllm:num_requests_running") + waiting)

    def engine_pids(self) -> list[int]:
        """Every process below the server's, alive now."""
        found: list[int] = []
        todo = [self.process.pid]
        while todo:
            pid = todo.pop()
            try:
                text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            except OSError:
                continue
            children = [int(child) for child in text.split()]
            found += children
            todo += children
        return found


class Metrics:
    """A scrape of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self._samples = [sample for family in self.families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def chat(**fields: Any) -> dict[str, Any]:
    """A chat completion request, greedy, of 20 tokens where nothing else is said."""
    return {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": 20,
        **fields,
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, seconds: float, what: str) -> float:
    """Seconds until `condition()` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


@contextmanager
def serve(
    directory: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    seconds: float = 300,
) -> Iterator[Server]:
    """Start a server, wait until it answers, and end it in order unless that was done already.

    Args:
        seconds: It has to start in.
    """
    port, log = free_port(), directory / "log"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "--port", str(port), *arguments],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    server = Server(process, port, log)
    try:
        while not _answers(server):
            assert process.poll() is None, server.printed[-3000:]
            assert time.monotonic() - began < seconds, server.printed[-3000:]
            time.sleep(0.2)
        server.seconds = time.monotonic() - began
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _answers(server: Server) -> bool:
    try:
        return server.get("/live").status == 200
    except OSError:
        return False
