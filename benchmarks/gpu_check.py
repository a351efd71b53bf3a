# SPDX-License-Identifier: Apache-2.0
"""Time of one compaction launch on a GPU, beside the device's own copy bandwidth.

``python -m benchmarks.gpu_check`` prints one row per model shape and number of requests that
compact in one step, at K = 2048, r = 64 and blocks of 16 slots. Deep inside a request's life a
round moves r pairs per head, so that is what is measured. ``--small`` carries out one small launch
and prints nothing but its counts, for compute-sanitizer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from randkv.compactor.cuda import CUDACompactor
from randkv.compactor.native import pack_rounds
from randkv.kv_layout import strided_layout
from randkv.planner import RoundPlan
from randkv.selection import stream_key

BUDGET, BUFFER_SIZE, BLOCK_SIZE, PROMPT_LEN = 2048, 64, 16, 200
BLOCKS = -(-(BUDGET + 2 * BUFFER_SIZE) // BLOCK_SIZE)
"""Of one request."""
NUM_REQUESTS = (1, 16, 128)
NUM_LAUNCHES = 30
COPY_BYTES = 4 * 2**30


class Shape(NamedTuple):
    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int

    def block_bytes(self) -> int:
        """Of one block in one layer, in bfloat16."""
        return self.num_kv_heads * BLOCK_SIZE * 2 * self.head_size * 2


SHAPES = (Shape("Qwen3-4B", 36, 8, 128), Shape("Qwen3-32B", 64, 8, 128))


class Row(NamedTuple):
    """Of one shape and number of requests; seconds, medians.

    `gpu` is the kernel's time, `host` how long the engine's thread is busy with the call: packing
    the plans, staging them, and the launch.
    """

    gpu: float
    host: float
    num_bytes: int  # read and written


Rounds = list[tuple[RoundPlan, range]]


def compactor_of(shape: Shape, num_requests: int) -> CUDACompactor:
    """On zeros: what is moved does not matter to the time."""
    size = (num_requests * BLOCKS, shape.num_kv_heads, BLOCK_SIZE, 2 * shape.head_size)
    caches = [
        torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(shape.num_layers)
    ]
    return CUDACompactor(caches, strided_layout(caches[0]), range(shape.num_layers), 0, BLOCK_SIZE)


def rounds_of(first: int, num_requests: int, total: int) -> Rounds:
    """Rounds of requests [first, first + num_requests) of `total`, whose blocks are interleaved."""
    old_len = BUDGET + 2 * BUFFER_SIZE
    rounds: Rounds = []
    for request in range(first, first + num_requests):
        key = stream_key(str(request), 0)
        plan = RoundPlan(
            str(request), 7, key, PROMPT_LEN, old_len, old_len - BUFFER_SIZE, BUFFER_SIZE, BLOCKS
        )
        rounds.append((plan, range(request, total * BLOCKS, total)))
    return rounds


def copy_bandwidth() -> float:
    """Bytes read and written per second by a plain copy of a large tensor."""
    source = torch.zeros(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source))[0] for _ in range(12)]
    return 2 * source.numel() / statistics.median(seconds[2:])


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the GPU, and until the call came back."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    call()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000, host


def measure(shape: Shape, num_requests: int) -> Row:
    """Launches take turns among requests, so that none finds its slots in the L2 cache."""
    total = max(num_requests, 32)
    compactor = compactor_of(shape, total)
    turns = [rounds_of(first, num_requests, total) for first in range(0, total, num_requests)]
    on_device = [torch.from_numpy(pack_rounds(turn)).cuda() for turn in turns]
    for turn in turns[:3]:
        compactor.compact(turn)
    torch.cuda.synchronize()
    compactor.take_progress()
    gpu, host = [], []
    for launch in range(NUM_LAUNCHES):
        packed, turn = on_device[launch % len(turns)], turns[launch % len(turns)]
        gpu.append(timed(lambda p=packed: compactor._launch(p, num_requests))[0])
        host.append(timed(lambda t=turn: compactor.compact(t))[1])
    pairs = num_requests * shape.num_layers * shape.num_kv_heads * BUFFER_SIZE
    assert compactor.take_progress().pairs == (2 * NUM_LAUNCHES * pairs,) * 2
    num_bytes = 2 * pairs * 2 * shape.head_size * 2
    return Row(statistics.median(gpu), statistics.median(host), num_bytes)


def report() -> None:
    bandwidth = copy_bandwidth()
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, K={BUDGET} "
        f"r={BUFFER_SIZE}, blocks of {BLOCK_SIZE} slots\n"
        f"plain copy of {COPY_BYTES / 2e9:.1f} GB: {bandwidth / 1e9:.0f} GB/s, read and write\n"
        f"median of {NUM_LAUNCHES} launches, each timed alone by events around it\n\n"
        "shape      requests   GPU ms   call ms   MB moved     GB/s   of copy\n"
    )
    for shape in SHAPES:
        for num_requests in NUM_REQUESTS:
            sys.stdout.write(f"{shape.name:<10} {num_requests:>8} ")
            needed = max(num_requests, 32) * BLOCKS * shape.num_layers * shape.block_bytes()
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            if needed > 0.9 * free:
                sys.stdout.write(
                    f"not measured: needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free\n"
                )
                continue
            row = measure(shape, num_requests)
            rate = row.num_bytes / row.gpu
            sys.stdout.write(
                f"{row.gpu * 1e3:>8.3f} {row.host * 1e3:>9.3f} {row.num_bytes / 1e6:>10.1f} "
                f"{rate / 1e9:>8.0f} {rate / bandwidth:>8.1%}\n"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="one small launch, not timed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("error: no NVIDIA GPU that PyTorch can use\n")
        return 2
    if arguments.small:
        compactor = compactor_of(Shape("small", 2, 2, 64), 2)
        compactor.compact(rounds_of(0, 2, 2))
        torch.cuda.synchronize()
        sys.stdout.write(f"pairs evicted and copied: {tuple(compactor.take_progress().pairs)}\n")
        return 0
    report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
