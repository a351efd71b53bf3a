# SPDX-License-Identifier: Apache-2.0
"""With the policy off, patched vLLM is vLLM: same tokens, same blocks at every step."""

from __future__ import annotations

from pathlib import Path

from benchmarks.policy_off import workers


def test_same_tokens_and_same_blocks_as_unpatched_vllm(tiny_model: Path) -> None:
    with workers(tiny_model) as (patched, unpatched):
        mine, theirs = patched.ask("record"), unpatched.ask("record")
    assert mine["is_patched"]
    assert not theirs["is_patched"]
    assert mine["tokens"] == theirs["tokens"]
    assert mine["free_blocks"] == theirs["free_blocks"]
    assert len(mine["tokens"]) == 24
    assert min(mine["free_blocks"]) < 10, "the workload never filled the pool"
