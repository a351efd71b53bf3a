# SPDX-License-Identifier: Apache-2.0
"""Share of compaction in the wall time of a decode.

``python -m benchmarks.compaction`` decodes 16 requests of the default model at K = 256, r = 32 in
the KV memory of 4 dense requests of 4,000 tokens, over whole round intervals, and prints the share:
the native and the PyTorch compactor in turn, in one engine.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.engine.harness import Engine

NUM_REQUESTS = 16
POLICY = {"type": "randkv", "budget": 256, "buffer_size": 32}


class Share(NamedTuple):
    """Of a stretch in which every request ran `rounds` rounds; times in seconds."""

    rounds: int
    steps: int
    wall: float
    compaction: float

    @property
    def ratio(self) -> float:
        return self.compaction / self.wall


def measure(running: Engine, rounds: int) -> Share:
    """Decode until every request has compacted once, then measure `rounds` rounds of each.

    Aborts the requests in the end.
    """
    rng = random.Random(3)
    for i in range(NUM_REQUESTS):
        running.add(f"r{i}", [rng.randrange(100, 40_000) for _ in range(240)], 3000)
    worker = running.runner.kv_cache_policy
    while worker.num_rounds < NUM_REQUESTS:
        running.step()
    began, compaction, first, steps = time.perf_counter(), worker.seconds, worker.num_rounds, 0
    while worker.num_rounds < first + rounds * NUM_REQUESTS:
        running.step()
        steps += 1
    share = Share(rounds, steps, time.perf_counter() - began, worker.seconds - compaction)
    running.llm.llm_engine.abort_request([f"r{i}" for i in range(NUM_REQUESTS)])
    running.run()
    return share


def main() -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from tests.engine.harness import engine
    from tests.engine.models import SMOLLM2

    parser = argparse.ArgumentParser(prog="python -m benchmarks.compaction")
    parser.add_argument("--rounds", type=int, default=10, help="rounds per request and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    compactors = {}
    with engine(
        SMOLLM2, kv_cache_policy=POLICY, num_gpu_blocks_override=1013, max_model_len=4096
    ) as running:
        worker = running.runner.kv_cache_policy
        for back_end in ("native", "pytorch"):
            running.runner.cache_config.kv_cache_compactor = back_end
            worker.bind(running.runner)
            compactors[back_end] = worker.compactor
        for back_end in ("native", "pytorch") * arguments.repeats:
            worker.compactor = compactors[back_end]
            share = measure(running, arguments.rounds)
            sys.stdout.write(
                f"{back_end:7} {NUM_REQUESTS} requests, {share.rounds} rounds each, "
                f"{share.steps} steps: "
                f"{1000 * share.compaction / share.rounds / NUM_REQUESTS:.2f} ms per round, "
                f"{1000 * share.wall / share.steps:.0f} ms per step, "
                f"compaction {share.ratio:.2%} of the wall time\n"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
