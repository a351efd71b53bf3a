# SPDX-License-Identifier: Apache-2.0
"""Have Triton compile its driver module into TRITON_CACHE_DIR on a machine without a GPU.

The module links with the driver's libcuda.so.1, which only a GPU host has. An empty library of that
name is enough to link with; loading the module must then fail, and that is expected here.
"""

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as stub:
    library = f"{stub}/libcuda.so.1"
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=b"", check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = stub
    from triton.backends.nvidia.driver import CudaUtils

    with contextlib.suppress(ImportError):
        CudaUtils()
made = list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("cuda_utils*.so"))
assert len(made) == 1, made
