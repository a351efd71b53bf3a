# SPDX-License-Identifier: Apache-2.0
"""What the tests ask of workers in other processes, each of which imports this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from randkv.kv_layout import derived_layout
from randkv.stats import CompactionStats
from randkv.vllm.worker import cpu_writer


class Cache(NamedTuple):
    """One request's cache on one rank: float32 ``[layers, kv_heads, slots, head_size]``."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]


def remembered(worker: Any) -> list[str]:
    """Requests of which the worker knows evicted tokens or, in the V2 model runner, blocks."""
    policy = worker.model_runner.kv_cache_policy
    return [*policy._evicted_tokens, *getattr(policy, "_blocks", ())]


def untold(worker: Any) -> CompactionStats | None:
    """What the worker has counted and not yet sent with an output."""
    stats: CompactionStats | None = worker.model_runner.kv_cache_policy._untold
    return stats


def cache(worker: Any, block_ids: Sequence[int], num_slots: int) -> Cache:
    """Read slots off the rank's own KV caches, layers in their order in the model."""
    runner = worker.model_runner
    context = runner.compilation_config.static_forward_context
    names = runner.kv_cache_config.kv_cache_groups[0].layer_names
    tensors = [context[name].kv_cache for name in sorted(names, key=_layer_index)]
    builder = runner.attn_groups[0][0].get_metadata_builder()
    layout = derived_layout(tensors[0], cpu_writer(builder.isa, builder.kv_cache_dtype))
    block, offset = np.divmod(np.arange(num_slots), layout.block_size)
    block_bases = np.asarray(block_ids)[block] * layout.block_stride
    bases = np.arange(layout.num_kv_heads)[:, None] * layout.head_stride + block_bases
    keys = (bases + layout.key_slot_offsets[offset])[..., None] + layout.key_dim_offsets
    values = (bases + layout.value_slot_offsets[offset])[..., None] + layout.value_dim_offsets
    flat = [tensor.reshape(-1).numpy() for tensor in tensors]
    return Cache(np.stack([f[keys] for f in flat]), np.stack([f[values] for f in flat]))


def _layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())
