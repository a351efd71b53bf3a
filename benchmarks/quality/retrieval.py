# SPDX-License-Identifier: Apache-2.0
"""A pass key, stated once in the prompt or in generated text, asked for after some filler. Pure.

Filler, question and digits are forced; digits are measured. A greedy answer is right exactly when
each digit is the argmax after the right ones before it, so one request tells both the probability
of the right digits and whether a free answer would be right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.quality.item import Item
from benchmarks.quality.record import Record
from benchmarks.quality.text import Encode

OPENING = "Some text follows, and a question about it.\n\n"
FACT = "The pass key is {key}. Remember it.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is "
NUM_DIGITS = 5


def retrieval_items(
    encode: Encode,
    fillers: Sequence[Sequence[int]],
    num_keys: int,
    distances: Sequence[int],
    seed: int,
) -> list[Item]:
    """For every key and distance, the fact once in the prompt and once in generated text.

    Both put the fact `distance` tokens before the question: the beginning of one of `fillers`,
    token ids, in turn over keys.

    Raises:
        ValueError: A filler is shorter than a distance, or digits are not one token each.
    """
    shortest = min(len(filler) for filler in fillers)
    if max(distances) > shortest:
        raise ValueError(f"distance {max(distances)} is longer than the filler, {shortest} tokens")
    rng = random.Random(seed)
    opening, question = encode(OPENING), encode(QUESTION)
    items = []
    for number in range(num_keys):
        key = "".join(rng.choice("0123456789") for _ in range(NUM_DIGITS))
        fact, digits = encode(FACT.format(key=key)), encode(key)
        if len(digits) != NUM_DIGITS:
            raise ValueError(
                f"{key!r} is {len(digits)} tokens of this model: expected {NUM_DIGITS}"
            )
        for distance in distances:
            between = fillers[number % len(fillers)][:distance]
            rest = [*between, *question]
            for task, prompt, before in (
                ("prompt-fact", opening + fact, []),
                ("generated-fact", opening, fact),
            ):
                forced = (*before, *rest, *digits)
                first = len(forced) - NUM_DIGITS
                name = f"key-{number:02}"
                items.append(Item(task, name, distance, tuple(prompt), forced, 0, first))
    return items


def is_right(record: Record) -> bool:
    """Whether a greedy answer is the pass key."""
    return record.top_tokens == record.tokens


def nll(record: Record) -> float:
    """Mean negative log-likelihood of the right digits; nats per digit."""
    return -sum(record.logprobs) / len(record.logprobs)
