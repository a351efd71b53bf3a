# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM without the patch, as a second package tree made of links."""

from __future__ import annotations

import os
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
    for sums in patching.read_sums():
        path = target / sums.path
        text = path.read_text()
        path.unlink()  # the link, not what it points to
        path.write_text(text)
        os.utime(path, (0, 0))
    (target / patching.STAMP_NAME).unlink()
    patching.revert(target)
    return directory
