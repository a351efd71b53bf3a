# SPDX-License-Identifier: Apache-2.0
"""What the servers are driven with. Lengths suit the embedded model on two cores."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

PROMPT_SLACK = 32
"""Tokens by which the client's prompts may miss the length asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One load, the same for every arm.

    Attributes:
        about: What it shows, in half a sentence.
        num_requests: All arrive at once.
        input_len: Prompt tokens of each request, from a uniform distribution of random tokens.
        output_len: Output tokens of each request; the end of sequence is ignored.
        num_kv_blocks: KV cache of the server, blocks of `block_size` tokens.
        output_spread: Output lengths are uniform in ``output_len * (1 +- output_spread)``.
        shared_prefix_len: Prompt tokens, of `input_len`, that half of the requests share.
        repeats: Runs of each arm per pair asked for; short runs need more.
        arms: Those it is worth running, where the command line names none.
    """

    name: str
    about: str
    num_requests: int
    input_len: int
    output_len: int
    num_kv_blocks: int
    output_spread: float = 0.0
    shared_prefix_len: int = 0
    repeats: int = 1
    block_size: int = 16
    arms: tuple[str, ...] = ("dense", "randkv-128", "randkv-256", "randkv-512", "window-256")

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.input_len + round(self.output_len * (1 + self.output_spread))

    @property
    def server_options(self) -> list[str]:
        return [
            *("--block-size", str(self.block_size)),
            # vLLM keeps one block for itself.
            *("--num-gpu-blocks-override", str(self.num_kv_blocks + 1)),
            *("--max-model-len", str(self.longest + PROMPT_SLACK)),
        ]

    @property
    def client_options(self) -> list[str]:
        """Of ``vllm bench serve``."""
        requests = ["--num-prompts", str(self.num_requests)]
        requests += ["--max-concurrency", str(self.num_requests)]
        if self.shared_prefix_len:
            return [
                *requests,
                *("--dataset-name", "prefix_repetition"),
                *("--prefix-repetition-num-prefixes", "2"),
                *("--prefix-repetition-prefix-len", str(self.shared_prefix_len)),
                *("--prefix-repetition-suffix-len", str(self.input_len - self.shared_prefix_len)),
                *("--prefix-repetition-output-len", str(self.output_len)),
            ]
        ratio = json.dumps({"input": 0.0, "output": self.output_spread})
        return [
            *requests,
            *("--dataset-name", "random", "--random-range-ratio", ratio),
            *("--random-input-len", str(self.input_len)),
            *("--random-output-len", str(self.output_len)),
        ]

    def quick(self) -> Workload:
        """Half as many requests, half as long, in a third of the memory; one policy arm."""
        return replace(
            self,
            num_requests=max(self.num_requests // 2, 1),
            output_len=self.output_len // 2,
            num_kv_blocks=self.num_kv_blocks // (3 if self.num_requests > 1 else 2),
            repeats=min(self.repeats, 2),
            arms=("dense", "randkv-128"),
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("memory-bound", "KV memory holds 4 of 16 full caches", 16, 64, 1000, 330),
        Workload("roomy", "KV memory holds every full cache", 16, 64, 1000, 1200),
        Workload(
            *("short", "outputs end before any budget is reached", 16, 64, 128, 1200),
            repeats=4,
            arms=("dense", "randkv-256"),
        ),
        Workload(
            *("mixed", "outputs from 100 to 1,900 tokens, memory as in memory-bound"),
            *(16, 64, 1000, 330, 0.9),
            arms=("dense", "randkv-256"),
        ),
        Workload(
            *("prefix-shared", "halves of the requests share 96 of 128 prompt tokens"),
            *(16, 128, 600, 330),
            shared_prefix_len=96,
            arms=("dense", "randkv-256"),
        ),
        Workload(
            *("long-decode", "one request of 6,000 tokens", 1, 64, 6000, 400),
            arms=("dense", "randkv-256"),
        ),
    )
}
