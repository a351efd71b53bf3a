# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the kernel: it compiles, and stays within what the launch bounds assume."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from randkv.compactor.native import LIBRARIES
from tests.needs import skip_or_fail
from tests.op.back_ends import BUILD, REPOSITORY, make

NVCC = REPOSITORY / "build" / "cuda" / "nvidia" / "cu13" / "bin" / "nvcc"
VECTORS = 3  # the kernel is there for vectors of 16, 4 and 1 bytes
MAX_REGISTERS = 64  # with 256 threads, four blocks of threads share a processor's 65,536
MAX_SHARED_BYTES = 32 * 1024


@pytest.fixture(scope="module")
def ptxas_log() -> str:
    try:
        make("nvcc")
    except AssertionError as error:
        skip_or_fail(f"nvcc could not be installed from PyPI: {error}")
    make("cuda")
    return (BUILD / "cuda" / "compact_kernel.log").read_text()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nothing_spills_and_four_blocks_of_threads_fit(ptxas_log: str, architecture: str) -> None:
    kernels = [
        part for part in ptxas_log.split("Compiling entry function")[1:] if architecture in part
    ]
    assert len(kernels) == VECTORS
    for kernel in kernels:
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", kernel
        ).groups()  # type: ignore[union-attr]
        registers = re.search(r"Used (\d+) registers", kernel)
        shared = re.search(r"(\d+) bytes smem", kernel)
        assert registers
        assert shared
        assert (stack, stores, loads) == ("0", "0", "0")
        assert int(registers[1]) <= MAX_REGISTERS
        assert int(shared[1]) <= MAX_SHARED_BYTES


def test_slots_are_moved_16_bytes_at_a_time(ptxas_log: str, tmp_path: Path) -> None:
    assert ptxas_log
    ptx = tmp_path / "compact_kernel.ptx"
    source = REPOSITORY / "csrc" / "cuda" / "compact_kernel.cu"
    subprocess.run(
        [NVCC, "-std=c++17", "-O3", "-arch=compute_90", "-ptx", source, "-o", ptx], check=True
    )
    instructions = ptx.read_text()
    assert instructions.count("ld.global.v4") == instructions.count("st.global.v4") == 2


def test_the_library_asks_for_no_cuda_runtime_but_torchs(ptxas_log: str) -> None:
    assert ptxas_log
    listing = subprocess.run(
        ["readelf", "-d", LIBRARIES / "librandkv_cuda.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = re.findall(r"NEEDED.*\[(\S+?)\.so", listing)
    assert {"libtorch_cuda", "libtorch_cpu"} <= set(needed)
    assert not [name for name in needed if "cudart" in name or "torch_python" in name]


def test_the_library_loads_and_registers_its_kernel(ptxas_log: str, tmp_path: Path) -> None:
    """With a stand-in for libtorch_cuda.so, which the CPU build of PyTorch lacks."""
    assert ptxas_log
    stand_in = tmp_path / "libtorch_cuda.so"
    subprocess.run(
        ["g++", "-shared", "-Wl,-soname,libtorch_cuda.so", "-x", "c++", "-", "-o", stand_in],
        input='extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }',
        text=True,
        check=True,
    )
    script = (
        "import ctypes, torch\n"
        f"ctypes.CDLL({str(stand_in)!r})\n"
        "from randkv.compactor import check\n"
        "check('native', 'cuda')\n"
        "assert torch._C._dispatch_has_kernel_for_dispatch_key('randkv::compact', 'CUDA')\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
