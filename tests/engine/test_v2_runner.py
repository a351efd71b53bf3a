# SPDX-License-Identifier: Apache-2.0
"""vLLM's V2 model runner, its default on GPUs, on a CPU: the kernels run interpreted.

In a process of its own, since Triton and the choice of the runner must be there before vLLM is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix) / "triton"
"""Where `deploy/local/setup.sh` puts it, out of everyone else's path."""

COPY_ON_WRITE = "test_copy_on_write_into_a_block_that_another_round_has_just_freed"
TESTS = ["tests/engine/v2_runner.py", f"tests/engine/test_lifecycle.py::{COPY_ON_WRITE}"]


@pytest.mark.slow
def test_v2_model_runner() -> None:
    assert (TRITON / "triton").is_dir(), f"no Triton in {TRITON}: run make setup"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.engine.triton_on_cpu", *TESTS],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(TRITON),
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
        },
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
