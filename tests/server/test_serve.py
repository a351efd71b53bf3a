# SPDX-License-Identifier: Apache-2.0
"""``python -m server`` as a user starts it: real process, real HTTP, the printed curl."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]


class Served(NamedTuple):
    """A running server: where it is, what it printed, and how long it took to be ready."""

    url: str
    printed: str
    seconds: float


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    began = time.monotonic()
    policy = '{"type": "randkv", "budget": 96, "buffer_size": 16}'
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "--port", str(port), "--kv-cache-policy", policy],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while "Stop with Ctrl-C" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() - began < 300, log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        seconds = time.monotonic() - began
        yield Served(f"http://127.0.0.1:{port}", log.read_text(errors="replace"), seconds)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) in (0, -signal.SIGINT, 130)


def post(served: Served, body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(override: Any = None, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Count from one to one hundred."}],
        "temperature": 0,
        "max_tokens": 20,
        **fields,
    }
    if override is not None:
        body["vllm_xargs"] = {"kv_cache_policy": json.dumps(override)}
    return body


def test_ready_in_under_a_minute(served: Served) -> None:
    assert served.seconds < 60


def test_the_printed_curl_works(served: Served) -> None:
    command = re.search(r"^curl .*$", served.printed, re.MULTILINE)
    assert command
    done = subprocess.run(
        ["bash", "-c", f"{command[0]} -sS"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert len(message["content"]) > 20


def test_decodes_past_the_budget(served: Served) -> None:
    status, answer = post(served, chat(max_tokens=200, ignore_eos=True))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 200


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ({"type": "randkv", "budge": 50}, "kv_cache_policy.budge"),
        ({"type": "randkv", "budget": 5}, "kv_cache_policy.budget"),
        ({"type": "window"}, "kv_cache_policy.type"),
    ],
)
def test_a_bad_override_is_a_400_that_names_the_field(
    served: Served, override: Any, field: str
) -> None:
    status, answer = post(served, chat(override))
    assert status == 400
    assert answer["error"]["param"] == field
    assert answer["error"]["message"].startswith(f"{field} has value ")
    assert answer["error"]["code"] == 400
    assert post(served, chat())[0] == 200


def test_beam_search_is_a_400(served: Served) -> None:
    status, answer = post(served, chat(use_beam_search=True, n=2))
    assert status == 400
    assert "beam search" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kv-cache-policy", '{"type": "randkv", "budget": 0}'], "kv_cache_policy.budget"),
        (["--kv-cache-policy-limits", '{"budgets": 1}'], "kv_cache_policy_limits.budgets"),
    ],
)
def test_a_bad_option_stops_the_start_with_the_field_named(arguments: list[str], text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "server", "--port", "0", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert text in done.stdout + done.stderr
