# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM without the patch, as a second package tree made of links."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from randkv import patching


def make_unpatched(directory: Path) -> Path:
    """Make ``directory/vllm``: links to the installed files, and the touched ones as released.

    Returns:
        `directory`, to put first on ``PYTHONPATH``.

    Raises:
        RandKVPatchError: A file is not what the patch left there.
    """
    installed = patching.find_vllm()
    target = directory / "vllm"
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-rs", f"{installed}/", str(target)], check=True)
    for cache in target.rglob("__pycache__"):
        shutil.rmtree(cache)
    patching.revert(target)  # replaces links, never what they point to
    return directory
