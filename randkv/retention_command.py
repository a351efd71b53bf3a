# SPDX-License-Identifier: Apache-2.0
"""``python -m randkv retention``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from randkv.config import RandKVConfig
from randkv.errors import RandKVError
from randkv.retention import MAX_COMPUTED_TOKENS, RetentionMap, retention_map
from randkv.retention_picture import to_png, to_svg

ABOUT = "show which positions each KV head of one layer still holds of a request"
_FORMATS = ("json", "svg", "png")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = RandKVConfig()
    add("--request-key", required=True, help="the request's kv_cache_policy.request_key")
    add("--prompt-tokens", type=int, required=True, help="prompt length; tokens, 1 to the budget")
    add(
        "--computed-tokens",
        type=int,
        required=True,
        help=f"prompt and decoded tokens; at most {MAX_COMPUTED_TOKENS}",
    )
    add(
        "--budget",
        type=int,
        default=default.budget,
        help="positions that stay per KV head, prompt included; tokens (default %(default)s)",
    )
    add(
        "--buffer-size",
        type=int,
        default=default.buffer_size,
        help="newest tokens that are never evicted, on top of the budget (default %(default)s)",
    )
    add("--seed", type=int, default=default.seed, help="policy seed (default %(default)s)")
    add("--layer", type=int, default=0, help="layer index, from 0 (default %(default)s)")
    add(
        "--kv-heads",
        type=int,
        default=8,
        help="KV heads per layer of the whole model (default %(default)s)",
    )
    add(
        "--format",
        choices=_FORMATS,
        help="default: by the suffix of --output; json without --output",
    )
    add("--output", type=Path, metavar="FILE", help="default: standard output")


def _format(arguments: argparse.Namespace) -> str:
    output: Path | None = arguments.output
    name: str | None = arguments.format
    if name is None:
        name = "json" if output is None else output.suffix[1:].lower()
    if name not in _FORMATS:
        raise RandKVError(
            f"--output {str(output)!r} has no suffix .json, .svg or .png. Give it one, or --format."
        )
    if name == "png" and output is None and sys.stdout.isatty():
        raise RandKVError("A PNG picture cannot be shown on a terminal. Give --output FILE.")
    return name


def _rendered(retained: RetentionMap, name: str) -> bytes:
    if name == "png":
        return to_png(retained)
    text = to_svg(retained) if name == "svg" else json.dumps(retained.to_dict()) + "\n"
    return text.encode()


def run(arguments: argparse.Namespace) -> None:
    name = _format(arguments)
    retained = retention_map(
        RandKVConfig(arguments.budget, arguments.buffer_size, arguments.seed),
        request_key=arguments.request_key,
        prompt_tokens=arguments.prompt_tokens,
        computed_tokens=arguments.computed_tokens,
        layer=arguments.layer,
        num_kv_heads=arguments.kv_heads,
    )
    data = _rendered(retained, name)
    if arguments.output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        arguments.output.write_bytes(data)
