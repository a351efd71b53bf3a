# SPDX-License-Identifier: Apache-2.0
"""Two engines that run `benchmarks.workload` in turn: what one costs over the other.

Both are up all the time; runs are short and pairs alternate who goes first, so a slow minute of the
machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from benchmarks import spread

REPOSITORY = Path(__file__).resolve().parents[1]


class Worker:
    """A process with an engine in it, which answers every line with a line of JSON.

    Args:
        module: What it runs, with `arguments`.
        path: Where it finds packages before the installed ones.
    """

    def __init__(self, module: str, *arguments: str, path: Sequence[Path] = ()) -> None:
        self._module = module
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, REPOSITORY]))}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed in `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: what follows says so
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            last = self._log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{self._module} ended with {status}:\n{last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._log.close()


def own_stdout() -> TextIO:
    """Standard output for answers alone: what vLLM prints goes to standard error from here on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_commands(answers: TextIO, answer: Callable[..., dict[str, Any]]) -> None:
    """The other end of `Worker.ask`: ``answer(command, *arguments)`` for every line."""
    for line in sys.stdin:
        answers.write(json.dumps(answer(*line.split())) + "\n")
        answers.flush()


def compare(ours: Worker, other: Worker, num_pairs: int, num_tokens: int) -> list[float]:
    """Output tokens/s of `ours` over `other`, by pair; says on the way how it stands."""
    ratios: list[float] = []
    for i in range(num_pairs):
        order = (ours, other) if i % 2 == 0 else (other, ours)
        seconds = {worker: worker.ask(f"time {num_tokens}")["seconds"] for worker in order}
        ratios.append(seconds[other] / seconds[ours])
        if (i + 1) % -(-num_pairs // 10) == 0:
            sys.stdout.write(f"{i + 1} pairs: median {statistics.median(ratios):.4f}\n")
            sys.stdout.flush()
    return ratios


def show(what: str, ratios: list[float]) -> None:
    """One line: the median with its 95 % interval, and the quartiles."""
    found = spread.median_and_quartiles(ratios, 4)
    sys.stdout.write(f"output tokens/s, {what}, {len(ratios)} pairs: median {found}\n")
