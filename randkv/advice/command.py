# SPDX-License-Identifier: Apache-2.0
"""``python -m randkv advise``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from randkv.advice.advisor import Plan, compare
from randkv.advice.memory import (
    DEFAULT_ALLOWANCE_GIB,
    DEFAULT_UTILIZATION,
    find_weights,
    given_kv_memory,
    kv_memory_of,
)
from randkv.advice.model_shape import DTYPE_BYTES, KV_DTYPES, load_model, model_shape
from randkv.advice.picture import to_png
from randkv.advice.recommendation import notes, recommend
from randkv.advice.report import Advice, to_text
from randkv.advice.step_time import read_latency, roofline
from randkv.advice.workload import Workload, given_lengths, read_access_log
from randkv.config import RandKVConfig
from randkv.errors import RandKVConfigError, RandKVError

ABOUT = "compare budgets for a model, a GPU memory and a workload, and recommend one"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="directory with a config.json, its path, or a Hub name")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--gpu-memory", type=float, metavar="GIB", help="of one GPU")
    memory.add_argument("--kv-memory", type=float, metavar="GIB", help="KV cache of one GPU")
    add("--prompt-tokens", type=int, help="prompt length")
    add("--max-tokens", type=int, help="output length")
    add(
        "--access-log",
        type=Path,
        metavar="FILE",
        help="take prompt and output lengths from the server's access log instead",
    )
    add("--budget", type=int, action="append", help="a budget to compare; may be repeated")
    add(
        "--buffer-size",
        type=int,
        default=RandKVConfig().buffer_size,
        help="newest tokens that are never evicted (default %(default)s)",
    )
    add("--concurrency", type=int, help="requests that should run at once")
    add("--tensor-parallel-size", type=int, default=1, help="GPUs (default %(default)s)")
    add(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_UTILIZATION,
        help="share of --gpu-memory that vLLM takes (default %(default)s, vLLM 0.28.0's)",
    )
    add(
        "--weights-gib",
        type=float,
        metavar="GIB",
        help="weights of all GPUs together (default: the directory's files, else an estimate)",
    )
    add(
        "--allowance-gib",
        type=float,
        default=DEFAULT_ALLOWANCE_GIB,
        metavar="GIB",
        help="of each GPU, for activations, CUDA graphs and libraries (default %(default)s, "
        "an assumption)",
    )
    add("--dtype", choices=("auto", *DTYPE_BYTES), default="auto", help="as of vllm serve")
    add(
        "--kv-cache-dtype",
        choices=("auto", *KV_DTYPES),
        default="auto",
        help="as of vllm serve",
    )
    add("--block-size", type=int, default=16, help="tokens per KV block (default %(default)s)")
    time = parser.add_mutually_exclusive_group()
    time.add_argument(
        "--latency", type=Path, metavar="FILE", help="JSON with the constants of a step's time"
    )
    time.add_argument(
        "--memory-bandwidth",
        type=float,
        metavar="GB/S",
        help="of one GPU: model a step as reading weights and resident KV once",
    )
    add("--format", choices=("text", "json"), default="text", help="default: %(default)s")
    add("--output", type=Path, metavar="FILE.png", help="draw the trade-off too")


def _workload(arguments: argparse.Namespace) -> Workload:
    lengths = {"prompt_tokens": arguments.prompt_tokens, "max_tokens": arguments.max_tokens}
    log: Path | None = arguments.access_log
    for field, value in lengths.items():
        if log is not None and value is not None:
            raise RandKVConfigError(
                field, value, "nothing beside access_log", "Give lengths or a log, not both."
            )
        if log is None and value is None:
            option = field.replace("_", "-")
            raise RandKVConfigError(
                field, None, "a number of tokens", f"Give --{option}, or --access-log."
            )
    if log is not None:
        return read_access_log(log)
    return given_lengths(**lengths)


def advise(arguments: argparse.Namespace) -> Advice:
    """The advice that the command line asks for.

    Raises:
        RandKVError: Something in it cannot be used; the error names it.
    """
    files = load_model(arguments.model)
    shape = model_shape(files, arguments.dtype, arguments.kv_cache_dtype)
    num_ranks: int = arguments.tensor_parallel_size
    bytes_per_token = shape.kv_bytes_per_token(num_ranks)
    workload = _workload(arguments)
    weights = None
    if arguments.kv_memory is None or arguments.memory_bandwidth is not None:
        weights = find_weights(files, shape, arguments.weights_gib)
    if arguments.kv_memory is not None:
        memory = given_kv_memory(arguments.kv_memory)
    else:
        assert weights is not None
        memory = kv_memory_of(
            arguments.gpu_memory,
            arguments.gpu_memory_utilization,
            weights,
            num_ranks,
            arguments.allowance_gib,
        )
    step_time = None
    if arguments.latency is not None:
        step_time = read_latency(arguments.latency)
    elif arguments.memory_bandwidth is not None:
        assert weights is not None
        step_time = roofline(weights.num_bytes / num_ranks, arguments.memory_bandwidth)
    plan = Plan(
        workload, bytes_per_token, memory, arguments.block_size, arguments.concurrency, step_time
    )
    full, options = compare(plan, arguments.buffer_size, arguments.budget)
    return Advice(
        shape,
        num_ranks,
        weights,
        plan,
        full,
        options,
        recommend(plan, full, options),
        notes(plan, shape.max_position_embeddings),
        arguments.dtype,
    )


def run(arguments: argparse.Namespace) -> None:
    output: Path | None = arguments.output
    if output is not None and output.suffix.lower() != ".png":
        raise RandKVError(f"--output {str(output)!r} has no suffix .png. Give it one.")
    found = advise(arguments)
    picture = to_png(found) if output is not None else None
    if output is not None and picture is not None:
        output.write_bytes(picture)
    as_json = arguments.format == "json"
    sys.stdout.write(json.dumps(found.to_dict()) + "\n" if as_json else to_text(found))
