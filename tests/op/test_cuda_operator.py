# SPDX-License-Identifier: Apache-2.0
"""csrc/cuda/compact.cpp, which needs a GPU, with CPU put for CUDA in its source and on the shim.

So its checks and the way its arguments are read are the product's; device, stream and launch
are not.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from randkv.compactor.native import layout_numbers
from randkv.kv_layout import strided_layout
from tests.op.back_ends import (
    BUILD,
    REPOSITORY,
    SlotBySlot,
    compacted,
    make,
    operator_rounds,
)
from tests.op.cases import Case, random_case

SUBSTITUTIONS = [
    (
        "STABLE_TORCH_LIBRARY_IMPL(randkv, CUDA, m)",
        "STABLE_TORCH_LIBRARY(randkv_shim, m) { m.def(RANDKV_COMPACT_SCHEMA); }\n"
        "STABLE_TORCH_LIBRARY_IMPL(randkv_shim, CPU, m)",
    ),
    ("is_cuda()", "is_cpu()"),
    ("const torch::stable::accelerator::DeviceGuard guard(device);", ""),
    ("aoti_torch_get_current_cuda_stream(device, &stream)", "TORCH_SUCCESS"),
    (
        '#include "compact_launch.h"',
        '#include "../shim/compact_shim.h"\n#include "../schema.h"\n'
        "std::string randkv::launch_compact(const CompactParams& params, int, void*) {\n"
        "  return launch_on_shim(params, 2, 0);\n}",
    ),
]

Arguments = dict[str, Any]


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    make("shim")
    folder = tmp_path_factory.mktemp("operator")
    source = (REPOSITORY / "csrc" / "cuda" / "compact.cpp").read_text()
    for there, instead in SUBSTITUTIONS:
        assert there in source
        source = source.replace(there, instead)
    (folder / "compact.cpp").write_text(source)
    torch_folder = Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"),
            "-DTORCH_TARGET_VERSION=0x020b000000000000",
            *("-isystem", torch_folder / "include", "-I", REPOSITORY / "csrc" / "cuda"),
            folder / "compact.cpp",
            *(BUILD / "plain" / name for name in ("compact_shim.o", "cuda_shim_fibers.o")),
            *("-L", torch_folder / "lib", "-ltorch_cpu", "-o", folder / "operator.so"),
        ],
        check=True,
    )
    torch.ops.load_library(folder / "operator.so")
    return torch.ops.randkv_shim.compact


def arguments_of(case: Case) -> Arguments:
    rows, block_ids = operator_rounds(case.rounds)
    return {
        "kv_caches": case.kv_caches,
        "rounds": torch.from_numpy(rows),
        "block_ids": torch.from_numpy(block_ids),
        "layers": torch.tensor(case.arguments["layers"], dtype=torch.int32),
        "layout": layout_numbers(strided_layout(case.kv_caches[0])),
        "first_kv_head": case.arguments["first_kv_head"],
        "manager_block_size": case.arguments["manager_block_size"],
        "counters": torch.zeros(3, dtype=torch.int64),
    }


@pytest.mark.parametrize("seed", range(3000, 3008))
def test_the_operator_leaves_the_bytes_of_the_planner(
    compact: Callable[..., None], seed: int
) -> None:
    case = random_case(seed, 100, max_heads=3)
    expected = case.copy()
    counts = compacted(expected.compactor(SlotBySlot), expected.rounds)
    arguments = arguments_of(case)
    compact(**arguments)
    assert torch.equal(case.memory, expected.memory)
    assert arguments["counters"].tolist() == [counts.evicted, counts.copied, 0]


def test_no_rounds_are_no_error(compact: Callable[..., None]) -> None:
    case = random_case(1, 50)
    before = case.memory.clone()
    compact(**arguments_of(case) | {"rounds": torch.zeros((0, 8), dtype=torch.int32)})
    assert torch.equal(case.memory, before)


def long(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64)


def ints(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def caches(*size: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_caches": []}, "kv_caches are 0 tensors; 1 to 256 can be compacted"),
        ({"kv_caches": 257 * caches(1, 1, 8, 2)}, "kv_caches are 257 tensors"),
        ({"kv_caches": caches(2, 8, 2)}, "kv_caches have 3 dimensions, not 4"),
        ({"kv_caches": caches(1, 1, 8, 2, dtype=torch.float64)}, "kv_caches have dtype Double"),
        (
            {"kv_caches": caches(1, 1, 8, 2) + caches(2, 1, 8, 2)},
            "kv_caches[1] differs from kv_caches[0]",
        ),
        ({"kv_caches": caches(1, 1, 8, 3), "layers": ints(1)}, "2 * head_size], not [1, 1, 8, 3]"),
        ({"rounds": long(1, 8)}, "rounds has dtype Long, not Int"),
        ({"rounds": ints(8)}, "rounds has 1 dimensions, not 2"),
        ({"rounds": ints(2, 7)}, "rounds has rows of 7 entries, not 8"),
        ({"rounds": ints(8, 8).t()}, "rounds is not contiguous"),
        ({"block_ids": long(4)}, "block_ids has dtype Long, not Int"),
        ({"layers": ints(77)}, "layers has 77 entries for"),
        ({"counters": long(2)}, "counters has 2 entries, not 3"),
        ({"layout": long(3)}, "layout has 3 entries, not 5 + 2 * block_size + 2 * head_size ="),
        ({"layout": ints(3)}, "layout is not a contiguous int64 tensor on the CPU"),
        ({"first_kv_head": -1}, "first_kv_head is -1"),
        ({"manager_block_size": 7}, "manager_block_size is 7, not a multiple of block_size"),
    ],
    ids=lambda value: value.split(";")[0] if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused(
    compact: Callable[..., None], change: Arguments, message: str
) -> None:
    case = random_case(5, 50)
    before = case.memory.clone()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        compact(**arguments_of(case) | change)
    assert torch.equal(case.memory, before)
