# SPDX-License-Identifier: Apache-2.0
"""One request at a time in an engine, decoded on command.

``python -m benchmarks.decoder MODEL POLICY MAX_LEN`` reads one command a line and answers each with
one line of JSON. ``start``: drops what runs and adds a request. ``step N``: N more output tokens,
a step each; their seconds, and the rounds that the request has run and the blocks it holds after.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

PROMPT_LEN = 64
BLOCK_SIZE = 16


def main() -> int:
    model, policy, max_len = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes elsewhere
    from pathlib import Path

    from tests.engine.harness import engine

    rng = random.Random(5)
    prompt = [rng.randrange(2, 500) for _ in range(PROMPT_LEN)]
    options = {"max_model_len": int(max_len), "block_size": BLOCK_SIZE, "dtype": "auto"}
    num_started = rounds_before = 0
    with engine(Path(model), kv_cache_policy=policy, **options) as running:
        worker = running.runner.kv_cache_policy
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "start":
                if num_started:
                    running.llm.llm_engine.abort_request([f"r{num_started}"])
                    running.run()
                num_started += 1
                rounds_before = worker.num_rounds
                running.add(f"r{num_started}", prompt, int(max_len) - PROMPT_LEN)
                answers.write("{}\n")
            else:
                seconds = []
                for _ in range(int(arguments[0])):
                    began = time.perf_counter()
                    running.step()
                    seconds.append(time.perf_counter() - began)
                rounds = worker.num_rounds - rounds_before
                blocks = running.num_blocks - running.pool.get_num_free_blocks()
                answer = {"seconds": seconds, "rounds": rounds, "blocks": blocks}
                answers.write(json.dumps(answer) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
