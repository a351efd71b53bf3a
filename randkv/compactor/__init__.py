# SPDX-License-Identifier: Apache-2.0
"""Compactors: carry out round plans on KV cache tensors. All back ends give the same bytes.

``native`` is the compiled operator ``randkv::compact`` of `csrc/`, for CPUs and for NVIDIA GPUs;
``pytorch`` needs nothing compiled and runs wherever PyTorch does. Nothing falls back from one to
the other: the operator of the server chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from randkv.compactor.base import Compactor, PairCounts, Progress
from randkv.errors import RandKVConfigError

if TYPE_CHECKING:
    import torch

    from randkv.kv_layout import KVLayout

BackEnd = Literal["native", "pytorch"]


def check(back_end: str, device_type: str) -> None:
    """Whether `back_end` can be used for caches on `device_type` ("cpu" or "cuda").

    Raises:
        RandKVConfigError: There is no back end of that name.
        RandKVCompactorError: It cannot be loaded.
    """
    if back_end not in get_args(BackEnd):
        raise RandKVConfigError(
            "kv_cache_compactor", back_end, " or ".join(map(repr, get_args(BackEnd)))
        )
    if back_end == "native":
        from randkv.compactor.native import load

        load(device_type)


def make_compactor(
    back_end: BackEnd,
    kv_caches: Sequence[torch.Tensor],
    layout: KVLayout,
    *,
    layers: Sequence[int],
    first_kv_head: int,
    manager_block_size: int,
) -> Compactor:
    """The compactor of one rank.

    Args:
        back_end: Which implementation.
        kv_caches: One tensor per layer, all of one shape, strides, dtype and device.
        layout: Of every tensor.
        layers: Global index of each tensor's layer.
        first_kv_head: Global index of this rank's first KV head.
        manager_block_size: Slots of one block id; a multiple of the layout's block size.

    Raises:
        RandKVCompactorError: The native library cannot be loaded.
    """
    kind: Callable[..., Compactor]
    if back_end == "pytorch":
        from randkv.compactor.pytorch import PyTorchCompactor

        kind = PyTorchCompactor
    elif kv_caches[0].device.type == "cpu":
        from randkv.compactor.native import CPUCompactor

        kind = CPUCompactor
    else:
        from randkv.compactor.cuda import CUDACompactor

        kind = CUDACompactor
    return kind(
        kv_caches,
        layout,
        layers=layers,
        first_kv_head=first_kv_head,
        manager_block_size=manager_block_size,
    )


__all__ = ["BackEnd", "Compactor", "PairCounts", "Progress", "check", "make_compactor"]
