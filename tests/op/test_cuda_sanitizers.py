# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel under sanitizers, and proof that faults in it would be seen there.

Both programs run random rounds against a reference in plain C++. Under AddressSanitizer and
UBSan, the threads of a block are fibers with a schedule per seed; under ThreadSanitizer, they are
threads, and a missing barrier is a data race whatever the schedule.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.op.back_ends import BUILD, REPOSITORY, make

KERNEL = Path("csrc/cuda/compact_kernel.cuh")


def run_driver(program: Path, first_seed: int, num_cases: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(first_seed), str(num_cases)]
    environment = os.environ | {
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }
    # vLLM sets it for engines on CPUs, and AddressSanitizer wants to be loaded first.
    environment.pop("LD_PRELOAD", None)
    for prefix in ([], ["setarch", "-R"]):
        done = subprocess.run(
            prefix + command,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=environment,
        )
        # A sanitizer older than the kernel's address randomisation cannot start with it.
        if "unexpected memory mapping" not in done.stderr:
            break
    return done


@pytest.mark.parametrize(("sanitizer", "num_cases"), [("asan", 60), ("tsan", 3)])
def test_random_rounds_are_carried_out_without_a_finding(sanitizer: str, num_cases: int) -> None:
    make(f"shim-{sanitizer}")
    done = run_driver(BUILD / f"compact_driver_{sanitizer}", 0, num_cases)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{num_cases} cases agree\n"


class Fault(NamedTuple):
    """`right`, once in the kernel, becomes `wrong`; the program under `sanitizer` says `words`."""

    name: str
    right: str
    wrong: str
    sanitizer: str
    words: str


MISSING_BARRIER = (
    "shared_.histogram[thread_] = 0;\n      __syncthreads();",
    "shared_.histogram[thread_] = 0;",
)
FAULTS = [
    Fault("missing barrier, by schedule", *MISSING_BARRIER, "asan", "case 0: "),
    Fault("missing barrier, by race", *MISSING_BARRIER, "tsan", "ThreadSanitizer: data race"),
    Fault("one buffer for all sums", "sum_buffer_ ^= 1;", "", "tsan", "ThreadSanitizer: data race"),
    Fault(
        "barrier that some threads skip",
        "__syncthreads();  // counts are zero; the last item's round is no longer read",
        "if (thread_ < 128) __syncthreads();",
        "asan",
        "wait at different barriers",
    ),
    Fault(
        "thread that leaves early",
        "const int num_items =",
        "if (thread_ == 7) return;\n    const int num_items =",
        "asan",
        "1 threads have exited",
    ),
    Fault(
        "off by one in the pairing of holes",
        "static_cast<int>(before >> 16) - first_move;",
        "static_cast<int>(before >> 16) - first_move + 1;",
        "asan",
        "differs at byte",
    ),
    Fault(
        "wrong stride",
        "head_ * params_.head_stride",
        "head_ * params_.slot_stride",
        "asan",
        "differs at byte",
    ),
    Fault(
        "unchecked index of a block id",
        "if (index < 0 || index >= params_.num_block_ids) return -1;",
        "",
        "asan",
        "AddressSanitizer: heap-",
    ),
    Fault(
        "unchecked block id",
        "if (block_id < 0 || block >= params_.num_blocks) return -1;",
        "",
        "asan",
        "AddressSanitizer: ",
    ),
    Fault(
        "more moves listed than there is room for",
        "if (0 <= hole && hole < kWindow)",
        "if (0 <= hole)",
        "asan",
        "runtime error: index",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    make(f"shim-{fault.sanitizer}")
    shutil.copytree(REPOSITORY / "csrc", tmp_path / "csrc")
    objects = Path("build/csrc") / fault.sanitizer
    shutil.copytree(REPOSITORY / objects, tmp_path / objects)
    source = (tmp_path / KERNEL).read_text()
    assert source.count(fault.right) == 1, "the fault does not apply to the kernel as it is"
    (tmp_path / KERNEL).write_text(source.replace(fault.right, fault.wrong))
    # Of what is linked, only the kernel is compiled again.
    subprocess.run(
        ["make", "-C", str(tmp_path / "csrc"), f"shim-{fault.sanitizer}"],
        check=True,
        capture_output=True,
    )
    program = tmp_path / "build" / "csrc" / f"compact_driver_{fault.sanitizer}"
    done = run_driver(program, 0, 40)
    assert done.returncode != 0
    assert fault.words in done.stderr, done.stderr
