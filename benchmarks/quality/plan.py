# SPDX-License-Identifier: Apache-2.0
"""What a run will do: its settings and its requests, from the command line's options."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.quality import retrieval, text
from benchmarks.quality.arm import Arm, arms
from benchmarks.quality.item import Item
from benchmarks.quality.record import Settings


class Request(NamedTuple):
    """One item under one arm."""

    arm: Arm
    item: Item

    @property
    def key(self) -> tuple[str, str]:
        return self.arm.name, self.item.key


class Plan(NamedTuple):
    settings: Settings
    requests: list[Request]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt included."""
        return max(request.item.total_len for request in self.requests)


def requests(arms: list[Arm], items: list[Item]) -> list[Request]:
    """Every item under dense, and under each arm that evicts anything from it.

    An arm that evicts nothing is the dense one.

    Raises:
        ValueError: An arm that evicts from no item, or whose budget a prompt does not fit.
    """
    found = []
    for arm in arms:
        chosen = [i for i in items if arm.is_dense or arm.evicts(len(i.prompt), i.output_len)]
        if not chosen:
            longest = max(item.total_len for item in items)
            raise ValueError(
                f"{arm.name} evicts from no item: the longest has {longest} tokens. "
                "Leave it out, or raise --text-len."
            )
        for item in chosen:
            if not arm.is_dense and len(item.prompt) > arm.budget:
                raise ValueError(
                    f"{arm.name} does not hold the {len(item.prompt)} prompt tokens of {item.key}, "
                    "all of which are kept. Raise the budget."
                )
            found.append(Request(arm, item))
    return found


def make_plan(options: argparse.Namespace, encode: text.Encode, engine: str, patch: str) -> Plan:
    """Items, arms, and the settings that name them.

    Raises:
        ValueError: Options that do not fit together, or not the text; says which.
    """
    if not options.prompt_len < options.text_len:
        raise ValueError(
            f"--text-len is {options.text_len}: expected more than --prompt-len, which is "
            f"{options.prompt_len}"
        )
    texts = text.files(options.text) if options.text else text.topics()
    source = "files" if options.text else "pydoc_data.topics, Python's language reference"
    num_windows = max(options.num_texts, options.num_free)
    windows = text.windows(texts, encode, num_windows, options.text_len)
    first, free = (
        dict(list(windows.items())[:number]) for number in (options.num_texts, options.num_free)
    )
    items = [
        *text.text_items(first, options.prompt_len),
        *retrieval.retrieval_items(
            encode, list(windows.values()), options.num_keys, options.distances, options.seed
        ),
        *text.free_items(free, options.prompt_len, options.free_len, options.seed),
    ]
    chosen = requests(arms(options.budgets, options.buffers, options.window), items)
    names = ("budgets", "buffers", "window", "num_texts", "prompt_len", "text_len", "num_keys")
    names += ("distances", "num_free", "free_len", "temperature", "seed", "concurrency")
    settings = Settings(
        model=options.model.name,
        model_sha256=_model_sha256(options.model),
        text=source,
        text_sha256=_sha256(part.encode() for pair in texts.items() for part in pair),
        engine=engine,
        patch=patch,
        num_records=len(chosen),
        **{name: getattr(options, name) for name in names},
    )
    return Plan(settings, chosen)


def _model_sha256(model: Path) -> str:
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.json")])
    return _sha256(file.read_bytes() for file in files)


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
