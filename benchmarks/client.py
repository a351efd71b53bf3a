# SPDX-License-Identifier: Apache-2.0
"""vLLM's own benchmark client, ``vllm bench serve``, run in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any


def options(url: str, model: str, tokenizer: str, seed: int, *more: str) -> list[str]:
    """Options of a run at temperature 0 whose outputs have exactly the lengths asked for."""
    return [
        *("--backend", "openai", "--base-url", url, "--model", model, "--tokenizer", tokenizer),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--seed", str(seed)),
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0", "--save-detailed", *more),
    ]


def drive(arguments: Sequence[str]) -> dict[str, Any]:
    """One run; what the client writes as its detailed result.

    Source: ``vllm/benchmarks/serve.py`` of vLLM 0.28.0, which the ``vllm`` command calls.
    """
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return asyncio.run(main_async(parsed))
