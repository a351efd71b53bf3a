# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.options import DEFAULT_MODEL, parse_arguments


def test_without_a_model_the_embedded_one_is_served_with_its_own_defaults() -> None:
    parsed = parse_arguments([])
    assert parsed.model == str(DEFAULT_MODEL)
    assert parsed.served_model_name == ["smollm2-135m-instruct"]
    assert parsed.enforce_eager is True
    assert (parsed.kv_cache_policy, parsed.host) == ("randkv", "127.0.0.1")


def test_what_the_user_says_wins() -> None:
    parsed = parse_arguments(
        ["--gpu-memory-utilization", "0.5", "--no-enforce-eager", "--served-model-name", "mine"]
    )
    assert parsed.gpu_memory_utilization == 0.5
    assert parsed.enforce_eager is False
    assert parsed.served_model_name == ["mine"]


@pytest.mark.parametrize("arguments", [["some/model"], ["--model", "some/model"]])
def test_another_model_gets_the_defaults_of_vllm(arguments: list[str]) -> None:
    parsed = parse_arguments([*arguments, "--kv-cache-policy", "dense"])
    assert parsed.model == "some/model"
    assert parsed.served_model_name is None
    assert parsed.enforce_eager is not True
    assert parsed.kv_cache_policy == "dense"


def test_a_compactor_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    """With the remedy, and without falling back to another."""
    script = (
        "import pathlib, sys; from randkv.compactor import native; import server.__main__ as m; "
        f"native.LIBRARIES = pathlib.Path({str(tmp_path)!r}); "
        "sys.argv = ['server', '--port', '1']; sys.exit(m.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"error: the native compactor {tmp_path}/librandkv_cpu.so cannot be")
    assert last.endswith("or choose --kv-cache-compactor pytorch.")
