# SPDX-License-Identifier: Apache-2.0
"""An item: one prompt with what its output is forced to be. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

Task = Literal["text", "prompt-fact", "generated-fact", "free"]
"""Held-out text; a fact stated in the prompt, or in generated text; free generation."""


class Item(NamedTuple):
    """Every arm runs the same items.

    Attributes:
        task: What is measured.
        name: Of the text or key; the pairing of facts stated here and there.
        distance: Filler tokens between a fact and the question; 0 for other tasks.
        prompt: Token ids; never evicted.
        forced: Token ids that the output begins with.
        num_free: Output tokens after those, sampled with `seed`.
        first_scored: Output index from which on tokens are measured.
        seed: Of the sampling.
    """

    task: Task
    name: str
    distance: int
    prompt: tuple[int, ...]
    forced: tuple[int, ...]
    num_free: int = 0
    first_scored: int = 0
    seed: int = 0

    @property
    def output_len(self) -> int:
        return len(self.forced) + self.num_free

    @property
    def total_len(self) -> int:
        return len(self.prompt) + self.output_len

    @property
    def key(self) -> str:
        """Names the item among all, and is its request key: the same keep-sets on every run."""
        return f"{self.task}/{self.name}/{self.distance}"
