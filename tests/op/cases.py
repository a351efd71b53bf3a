# SPDX-License-Identifier: Apache-2.0
"""Random caches and rounds on which all back ends must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from randkv.compactor import Compactor
from randkv.kv_layout import strided_layout
from randkv.planner import RoundPlan
from randkv.selection import StreamKey
from tests.op.back_ends import Rounds

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]


class Case(NamedTuple):
    memory: torch.Tensor  # uint8, all that the caches lie in
    kv_caches: list[torch.Tensor]  # views of it
    arguments: dict[str, object]  # of a compactor, besides the caches and their layout
    rounds: Rounds

    def copy(self, device: str = "cpu") -> Case:
        memory = self.memory.to(device, copy=True)
        return self._replace(memory=memory, kv_caches=[_moved(c, memory) for c in self.kv_caches])

    def compactor(self, make: Callable[..., Compactor], **more: object) -> Compactor:
        layout = strided_layout(self.kv_caches[0])
        return make(self.kv_caches, layout, **self.arguments, **more)


def _moved(view: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The view of another memory with the shape, strides and offset of `view`."""
    return memory.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())


def random_plan(rng: np.random.Generator, name: int, max_budget: int) -> RoundPlan:
    """Budgets are log-uniform, so that small ones are as common as large ones."""
    budget = int(np.exp(rng.uniform(0, np.log(max_budget + 0.5))))
    buffer_size = int(rng.choice([0, 1, rng.integers(0, min(512, budget) + 1)]))
    prompt_len = int(rng.choice([0, budget, rng.integers(0, budget + 1)]))
    num_evict = int(rng.integers(1, max(buffer_size, 1) + 1))
    if rng.random() < 0.1:  # more than a round evicts in practice
        num_evict = int(rng.integers(1, 2000))
    new_len = budget + buffer_size
    key = StreamKey(*(int(k) for k in rng.integers(0, 2**32, 2)))
    index = int(rng.integers(0, 1000))
    return RoundPlan(
        str(name), index, key, prompt_len, new_len + num_evict, new_len, buffer_size, num_blocks=0
    )


def random_case(seed: int, max_budget: int, *, max_heads: int = 16) -> Case:
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 4))
    num_heads = int(rng.integers(1, max_heads + 1))
    head_size = int(rng.choice([1, 2, 3, 4, 8, 10, 16]))
    block_size = int(rng.choice([8, 16, 24, 32, 64, 128]))
    blocks_per_id = int(rng.choice([1, 1, 2, 4]))
    dtype = DTYPES[rng.integers(len(DTYPES))]
    plans = [random_plan(rng, i, max_budget) for i in range(rng.integers(1, 5))]
    id_slots = block_size * blocks_per_id
    counts = [-(-plan.old_len // id_slots) for plan in plans]
    ids = rng.permutation(sum(counts) + 2)
    starts = np.cumsum([0, *counts])
    rounds = [
        (plan, ids[start : start + count].tolist())
        for plan, start, count in zip(plans, starts, counts, strict=False)
    ]
    kind = rng.choice(["HND", "NHD", "layers in blocks", "padded"])
    blocks, pair = len(ids) * blocks_per_id, 2 * head_size
    shape: tuple[int, ...]
    if kind == "HND":
        shape = (num_layers, blocks, num_heads, block_size, pair)
    elif kind == "NHD":
        shape = (num_layers, blocks, block_size, num_heads, pair)
    elif kind == "layers in blocks":
        shape = (blocks, num_layers, num_heads, block_size, pair)
    else:
        shape = (num_layers, blocks, num_heads, block_size + 1, pair + 3)
    numbers = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    memory = torch.from_numpy(numbers)
    whole = memory.view(dtype).view(shape)
    if kind == "layers in blocks":
        kv_caches = [whole[:, i] for i in range(num_layers)]
    else:
        kv_caches = [whole[i] for i in range(num_layers)]
    if kind == "NHD":
        kv_caches = [c.transpose(1, 2) for c in kv_caches]
    elif kind == "padded":
        kv_caches = [c[:, :, :block_size, :pair] for c in kv_caches]
    arguments = {
        "layers": rng.permutation(100)[:num_layers].tolist(),
        "first_kv_head": int(rng.integers(0, 9)),
        "manager_block_size": id_slots,
    }
    return Case(memory, kv_caches, arguments, rounds)
