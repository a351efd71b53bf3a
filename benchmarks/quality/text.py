# SPDX-License-Identifier: Apache-2.0
"""Held-out text: the topics of Python's language reference (PSF licence), or files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.quality.item import Item

Encode = Callable[[str], list[int]]


class NotEnoughTextError(ValueError):
    """Fewer long texts than asked for."""


def topics() -> dict[str, str]:
    """``pydoc_data.topics`` of this Python, by name; about 70 sections as plain text."""
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))


def files(paths: Sequence[Path]) -> dict[str, str]:
    """UTF-8 files by path, in the order given."""
    return {str(path): path.read_text(encoding="utf-8") for path in paths}


def windows(
    texts: Mapping[str, str], encode: Encode, num_texts: int, num_tokens: int
) -> dict[str, list[int]]:
    """The first `num_tokens` tokens of each of the first `num_texts` texts that are so long.

    One window per text, so that windows are independent of each other.

    Raises:
        NotEnoughTextError: Says how many there are.
    """
    found: dict[str, list[int]] = {}
    for name, text in texts.items():
        tokens = encode(text)[:num_tokens]
        if len(tokens) == num_tokens and len(found) < num_texts:
            found[name] = tokens
    if len(found) < num_texts:
        raise NotEnoughTextError(
            f"{len(found)} of {len(texts)} texts have {num_tokens} tokens or more, and "
            f"{num_texts} are asked for. Ask for fewer or shorter ones, or give --text files."
        )
    return found


def text_items(found: Mapping[str, Sequence[int]], prompt_len: int) -> list[Item]:
    """Every token after the prompt is forced and measured."""
    return [
        Item("text", name, 0, tuple(tokens[:prompt_len]), tuple(tokens[prompt_len:]))
        for name, tokens in found.items()
    ]


def free_items(
    found: Mapping[str, Sequence[int]], prompt_len: int, num_free: int, seed: int
) -> list[Item]:
    """The model continues the same beginnings by itself."""
    return [
        Item("free", name, 0, tuple(tokens[:prompt_len]), (), num_free, 0, seed + i)
        for i, (name, tokens) in enumerate(found.items())
    ]
