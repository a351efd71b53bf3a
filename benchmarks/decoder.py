# SPDX-License-Identifier: Apache-2.0
"""One request at a time in an engine, decoded on command.

``python -m benchmarks.decoder MODEL POLICY MAX_LEN`` reads one command a line and answers each with
one line of JSON. ``start``: drops what runs and adds a request. ``step N``: N more output tokens,
a step each; their seconds, and the rounds that the request has run and the blocks it holds after.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine_pair import answer_commands, own_stdout

if TYPE_CHECKING:
    from tests.engine.harness import Engine

PROMPT_LEN = 64
BLOCK_SIZE = 16


class Decoder:
    """What the commands do."""

    def __init__(self, running: Engine, max_tokens: int) -> None:
        self._running = running
        self._max_tokens = max_tokens
        self._worker = running.runner.kv_cache_policy
        self._num_started = self._rounds_before = 0

    def answer(self, command: str, *arguments: str) -> dict[str, Any]:
        return self._start() if command == "start" else self._step(int(arguments[0]))

    def _start(self) -> dict[str, Any]:
        if self._num_started:
            self._running.llm.llm_engine.abort_request([f"r{self._num_started}"])
            self._running.run()
        self._num_started += 1
        self._rounds_before = self._worker.num_rounds
        rng = random.Random(5)
        prompt = [rng.randrange(2, 500) for _ in range(PROMPT_LEN)]
        self._running.add(f"r{self._num_started}", prompt, self._max_tokens)
        return {}

    def _step(self, num_steps: int) -> dict[str, Any]:
        seconds = []
        for _ in range(num_steps):
            began = time.perf_counter()
            self._running.step()
            seconds.append(time.perf_counter() - began)
        return {
            "seconds": seconds,
            "rounds": self._worker.num_rounds - self._rounds_before,
            "blocks": self._running.num_blocks - self._running.pool.get_num_free_blocks(),
        }


def main() -> int:
    model, policy, max_len = sys.argv[1:]
    answers = own_stdout()
    from tests.engine.harness import engine

    options = {"max_model_len": int(max_len), "block_size": BLOCK_SIZE, "dtype": "auto"}
    with engine(Path(model), kv_cache_policy=policy, **options) as running:
        answer_commands(answers, Decoder(running, int(max_len) - PROMPT_LEN).answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
