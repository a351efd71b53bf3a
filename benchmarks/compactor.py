# SPDX-License-Identifier: Apache-2.0
"""One request's round on one CPU thread: native against PyTorch, selection and moves apart.

``make bench-compactor`` makes KV caches in the packed layout that vLLM's CPU attention has here
(36 layers, 8 KV heads, head size 128, bfloat16), and carries out rounds of one request at K = 2048,
r = 64 in them, back ends in turn. The floor is the plainest copy, element by element, of slots that
are already chosen.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as `python -m server` has it
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch

from randkv.compactor import make_compactor
from randkv.compactor.native import layout_numbers, pack_rounds
from randkv.kv_layout import derived_layout
from randkv.planner import RoundPlan
from randkv.selection import stream_key

ROOT = Path(__file__).parents[1]
NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 36, 8, 128  # Qwen3-4B
BUDGET, BUFFER_SIZE = 2048, 64


def parts_library() -> ctypes.CDLL:
    """`csrc/bench/parts.cpp`, built when it is not."""
    command = ["make", "-C", str(ROOT / "csrc"), "--no-print-directory", "parts"]
    subprocess.run([*command, f"PYTHON={sys.executable}"], check=True, stdout=subprocess.DEVNULL)
    return ctypes.CDLL(str(ROOT / "build/csrc/libparts.so"))


def milliseconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began)


def main() -> int:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from randkv.vllm.worker import cpu_writer

    parser = argparse.ArgumentParser(prog="python -m benchmarks.compactor")
    parser.add_argument("--block-size", type=int, default=128, help="vLLM's default on CPUs is 128")
    parser.add_argument("--isa", help="amx, vec or vec16; what vLLM picks here unless given")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=21)
    given = parser.parse_args()
    torch.set_num_threads(1)
    block_size = given.block_size
    isa = given.isa or _get_attn_isa(torch.bfloat16, block_size, HEAD_SIZE)
    compacted_len = BUDGET + BUFFER_SIZE
    old_len = compacted_len + BUFFER_SIZE
    num_blocks = -(-old_len // block_size)
    # Of eight such requests, so that tensors are not much smaller than an engine's.
    shape = (8 * num_blocks, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE)
    caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)]
    layout = derived_layout(caches[0], cpu_writer(isa, "auto"))
    block_ids = np.random.default_rng(0).permutation(shape[0])[:num_blocks].astype(np.int32)
    back_ends = {
        name: make_compactor(
            name,  # type: ignore[arg-type]
            caches,
            layout,
            layers=range(NUM_LAYERS),
            first_kv_head=0,
            manager_block_size=block_size,
        )
        for name in ("native", "pytorch")
    }
    parts = parts_library()
    numbers = layout_numbers(layout).numpy()
    pointers = (ctypes.c_void_p * NUM_LAYERS)(*(cache.data_ptr() for cache in caches))
    found = np.zeros((NUM_LAYERS, NUM_KV_HEADS, BUFFER_SIZE), np.int32)
    times: dict[str, list[float]] = {}
    heads = np.arange(NUM_LAYERS), np.arange(NUM_KV_HEADS)
    element_bytes, id_size = ctypes.c_int64(2), ctypes.c_int64(block_size)

    def compact(name: str, plan: RoundPlan) -> float:
        batch = [(plan, block_ids.tolist())]
        return milliseconds(lambda: back_ends[name].compact(batch))

    def part(name: str, plan: RoundPlan) -> float:
        """Moves that are already chosen: the operator's own code, or element by element."""
        row = pack_rounds([(plan, [])])
        evicted = plan.evicted_slots(*heads)
        caches_and_layout = pointers, block_ids.ctypes, numbers.ctypes, element_bytes
        if name == "native selection":
            run = partial(
                parts.randkv_select, row.ctypes, NUM_LAYERS, NUM_KV_HEADS, found.ctypes, False
            )
        elif name == "native moves":
            run = partial(
                parts.randkv_move, row.ctypes, NUM_LAYERS, *caches_and_layout, id_size,
                evicted.ctypes,
            )  # fmt: skip
        else:
            run = partial(
                parts.randkv_copy_elements, row.ctypes, NUM_LAYERS, *caches_and_layout,
                evicted.ctypes,
            )  # fmt: skip
        return milliseconds(run)

    measurements: dict[str, Callable[[str, RoundPlan], float]] = {
        "native": compact,
        "native selection": part,
        "native moves": part,
        "floor": part,
        "pytorch": compact,
        "pytorch selection": lambda _, plan: milliseconds(lambda: plan.evicted_slots(*heads)),
    }
    for index in range(given.repeats + 1):
        for number, (name, measure) in enumerate(measurements.items()):
            # A round of its own each time, so that none finds in the cache what another touched.
            plan = RoundPlan(
                "request", index * len(measurements) + number, stream_key("request", 0),
                given.prompt_len, old_len, compacted_len, BUFFER_SIZE, num_blocks,
            )  # fmt: skip
            value = measure(name, plan)
            if index:  # the first warms up
                times.setdefault(name, []).append(value)
    pairs = [tuple(back_end.take_progress().pairs) for back_end in back_ends.values()]
    assert pairs[0] == pairs[1], pairs
    write = sys.stdout.write
    write(
        f"one request, {NUM_LAYERS} layers x {NUM_KV_HEADS} KV heads x {HEAD_SIZE}, bfloat16, "
        f"K={BUDGET}, r={BUFFER_SIZE}, prompt {given.prompt_len}, layout {isa}, "
        f"block size {block_size}, one thread; milliseconds, {given.repeats} rounds\n"
    )
    for name, values in times.items():
        write(
            f"  {name:18} median {statistics.median(values):7.2f}   "
            f"{min(values):7.2f} to {max(values):7.2f}\n"
        )
    for name in ("pytorch", "floor"):
        ratios = [a / b for a, b in zip(times[name], times["native"], strict=True)]
        write(
            f"  {name} / native: median {statistics.median(ratios):.2f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f}\n"
        )
    write(f"  pairs evicted and copied, native {pairs[0]}, pytorch {pairs[1]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
