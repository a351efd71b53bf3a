# SPDX-License-Identifier: Apache-2.0
"""Models and plans that the tests of the advisor share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from randkv.advice.advisor import Plan
from randkv.advice.memory import KVMemory
from randkv.advice.step_time import StepTime
from randkv.advice.workload import Workload, given_lengths

QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN3_4B_TOKEN = 147_456
"""Bytes of one token in bfloat16: 2 * 36 layers * 8 KV heads * 128 * 2."""


def model(folder: Path, **changes: Any) -> Path:
    """A directory with Qwen3-4B's config, changed; a change to ``...`` removes the key."""
    config = {k: v for k, v in {**QWEN3_4B, **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def plan(
    workload: Workload | None = None,
    *,
    num_blocks: int = 1000,
    concurrency: int | None = None,
    step_time: StepTime | None = None,
    bytes_per_token: int = 4,
    block_size: int = 16,
) -> Plan:
    """`num_blocks` blocks for requests, beside vLLM's null block."""
    memory = KVMemory((num_blocks + 1) * block_size * bytes_per_token)
    work = workload or given_lengths(100, 3000)
    return Plan(work, bytes_per_token, memory, block_size, concurrency, step_time)
