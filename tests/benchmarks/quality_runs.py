# SPDX-License-Identifier: Apache-2.0
"""Settings and records of a made-up run, small enough to count by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.quality.arm import DENSE, Arm
from benchmarks.quality.record import Record, Settings

SETTINGS = Settings(
    model="m",
    model_sha256="0",
    text="t",
    text_sha256="0",
    engine="vllm 0",
    patch="p",
    budgets=(16,),
    buffers=(4,),
    window=True,
    num_texts=2,
    prompt_len=8,
    text_len=40,
    num_keys=2,
    distances=(16,),
    num_free=2,
    free_len=32,
    temperature=0.8,
    seed=0,
    concurrency=8,
    num_records=24,
)
RANDKV = Arm(kind="randkv", budget=16, buffer_size=4)
WINDOW = Arm(kind="window", budget=16, buffer_size=4)


def record(arm: Arm, **changes: Any) -> Record:
    """8 prompt and 32 output tokens, all scored; evictions as the arm demands."""
    fields = {"task": "text", "name": "a", "distance": 0, "prompt_len": 8, "output_len": 32}
    fields |= {"preemptions": 0, "first_scored": 0, **changes}
    evictions = arm.evictions(fields["prompt_len"], fields["output_len"])
    scored = fields["output_len"] - fields["first_scored"]
    measured = 0 if fields["task"] == "free" else scored
    defaults = {
        "rounds": evictions.rounds,
        "evicted_tokens": evictions.evicted_tokens,
        "tokens": list(range(scored)),
        "logprobs": [-1.0] * measured,
        "top_tokens": list(range(measured)),
    }
    return Record(arm=arm, **{**defaults, **fields})


def complete_run() -> list[Record]:
    """Two items of each task under dense, RandKV and the window."""
    found = []
    for arm in (DENSE, RANDKV, WINDOW):
        affected = 0 if arm.is_dense else 32 - arm.first_affected(8)
        for number, name in enumerate("ab"):
            loss = {"dense": 0.0, "randkv": 0.5, "window": 0.75}[arm.kind] + number * 0.1
            late = [*([-1.0] * (32 - affected)), *([-1.0 - loss] * affected)]
            others = [*range(32 - affected), *([99] * (affected // 2))]
            others += range(32 - affected + affected // 2, 32)
            found.append(record(arm, name=name, logprobs=late, top_tokens=others))
            for task in ("prompt-fact", "generated-fact"):
                is_lost = not arm.is_dense and task == "generated-fact" and number == 1
                found.append(
                    record(
                        arm,
                        task=task,
                        name=name,
                        distance=16,
                        first_scored=27,
                        top_tokens=[0, 1, 2, 3, 9 if is_lost else 4],
                    )
                )
            repeated = 0 if arm.is_dense else 16
            found.append(
                record(
                    arm, task="free", name=name, tokens=[*([7] * repeated), *range(32 - repeated)]
                )
            )
    return found
