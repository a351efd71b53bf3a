# SPDX-License-Identifier: Apache-2.0
"""``python -m server`` as a user starts it: ready in time, the printed curl, bad options."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.process import REPOSITORY, Server


def test_ready_in_under_a_minute(default_server: Server) -> None:
    assert default_server.seconds < 60


def test_the_printed_curl_works(default_server: Server) -> None:
    # The server looks five times a second whether it answers already.
    deadline = time.monotonic() + 5
    while not (command := re.search(r"^curl .*$", default_server.printed, re.MULTILINE)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = subprocess.run(
        ["bash", "-c", f"{command[0]} -sS"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout)["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert len(message["content"]) > 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kv-cache-policy", '{"type": "randkv", "budget": 0}'], "kv_cache_policy.budget"),
        (["--kv-cache-policy-limits", '{"budgets": 1}'], "kv_cache_policy_limits.budgets"),
        (
            ["--kv-cache-policy-limits", '{"allow_dense": false, "long_prompt": "dense"}'],
            "kv_cache_policy_limits.long_prompt",
        ),
        (["--api-keys-file", "/nowhere"], "--api-keys-file has value /nowhere: expected a file"),
        (["--port", "8123", "--metrics-port", "8123"], "--metrics-port has value 8123"),
        (["--max-choices", "0"], "'0' is not an integer from 1"),
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


def test_a_half_patched_vllm_never_becomes_ready(tmp_path: Path) -> None:
    import vllm

    installed = Path(vllm.__file__).parent
    copy = tmp_path / "vllm"
    copy.mkdir()
    for entry in installed.iterdir():
        (copy / entry.name).symlink_to(entry)
    (copy / "outputs.py").unlink()
    (copy / "outputs.py").write_text((installed / "outputs.py").read_text() + "# not ours\n")
    done = subprocess.run(
        [sys.executable, "-m", "server", "--port", "0"],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "vLLM is not patched, or not completely" in done.stderr
