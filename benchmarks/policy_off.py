# SPDX-License-Identifier: Apache-2.0
"""What the patch costs when the policy is off: patched against unpatched vLLM, in pairs.

``python -m benchmarks.policy_off`` prints the ratio of output tokens/s, patched over unpatched, as
the median over pairs with its spread. Both engines are up all the time; runs are short and pairs
alternate who goes first, so a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import spread
from benchmarks.unpatched import make_unpatched

REPOSITORY = Path(__file__).resolve().parents[1]


class Worker:
    """One `benchmarks.workload` process."""

    def __init__(self, model: Path, path: list[Path]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workload", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"benchmarks.workload ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@contextmanager
def workers(model: Path) -> Iterator[tuple[Worker, Worker]]:
    """A patched and an unpatched engine."""
    with tempfile.TemporaryDirectory() as directory:
        unpatched = make_unpatched(Path(directory))
        pair = (Worker(model, [REPOSITORY]), Worker(model, [unpatched, REPOSITORY]))
        try:
            yield pair
        finally:
            for worker in pair:
                worker.close()


def main() -> int:
    from tests.engine.models import make_tiny_model

    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy_off")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=20, help="output tokens per request")
    arguments = parser.parse_args()
    ratios = []
    with (
        tempfile.TemporaryDirectory() as directory,
        workers(make_tiny_model(Path(directory))) as (patched, unpatched),
    ):
        for i in range(arguments.pairs):
            order = (patched, unpatched) if i % 2 == 0 else (unpatched, patched)
            command = f"time {arguments.tokens}"
            seconds = {worker: worker.ask(command)["seconds"] for worker in order}
            ratios.append(seconds[unpatched] / seconds[patched])
            if (i + 1) % 50 == 0:
                sys.stdout.write(f"{i + 1} pairs: median {statistics.median(ratios):.4f}\n")
                sys.stdout.flush()
    low, _, high = statistics.quantiles(ratios, n=4)
    sys.stdout.write(
        f"output tokens/s, patched / unpatched, policy off: median "
        f"{spread.median(ratios).text(4)} over {len(ratios)} pairs, "
        f"quartiles {low:.4f} to {high:.4f}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
