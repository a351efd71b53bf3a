# SPDX-License-Identifier: Apache-2.0
"""Compactors against a slot-by-slot reference, on every layout that can be had on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from randkv.compactor import BackEnd, PairCounts, make_compactor
from randkv.errors import RandKVLayoutError
from randkv.kv_layout import KVLayout, WriteTokens, derived_layout, strided_layout
from randkv.planner import RoundPlan
from randkv.selection import stream_key
from randkv.vllm.worker import cpu_writer

NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE, NUM_BLOCKS = 2, 3, 32, 40


class Format(NamedTuple):
    """How one backend stores tokens: `make` a cache, and `write` tokens into it."""

    name: str
    block_size: int
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    layout: Callable[[torch.Tensor], KVLayout]
    write: WriteTokens


def strided(order: str, block_size: int, dtype: torch.dtype) -> Format:
    def make() -> torch.Tensor:
        if order == "HND":
            return torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE, dtype=dtype)
        cache = torch.zeros(NUM_BLOCKS, block_size, NUM_KV_HEADS, 2 * HEAD_SIZE, dtype=dtype)
        return cache.transpose(1, 2)

    def write(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        block, offset = slots // block_size, slots % block_size
        cache[block, :, offset] = torch.cat([keys, values], dim=2).to(dtype)

    return Format(f"{order}-{block_size}-{dtype}", block_size, dtype, make, strided_layout, write)


def packed(isa: str, block_size: int, dtype: torch.dtype, cache_dtype: str = "auto") -> Format:
    def make() -> torch.Tensor:
        return torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE, dtype=dtype)

    write = cpu_writer(isa, cache_dtype)
    name = f"{isa}-{block_size}-{dtype}-{cache_dtype}"
    return Format(name, block_size, dtype, make, lambda cache: derived_layout(cache, write), write)


AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
AVX512 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="needs AVX-512")
FORMATS = [
    strided("HND", 16, torch.bfloat16),
    strided("NHD", 16, torch.float32),
    strided("NHD", 8, torch.float16),
    strided("NHD", 16, torch.float8_e4m3fn),
    packed("vec16", 16, torch.float32),
    packed("vec", 32, torch.float32),
    packed("vec", 64, torch.float16),
    packed("vec", 128, torch.bfloat16),
    pytest.param(packed("amx", 32, torch.bfloat16), marks=AMX),
    pytest.param(packed("vec", 32, torch.uint8, "fp8_e4m3"), marks=AVX512),
    pytest.param(packed("amx", 32, torch.uint8, "fp8_e5m2"), marks=AMX),
]


def tokens(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers: exact in every cache dtype, bfloat16 and fp8 e5m2 included."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, NUM_KV_HEADS, HEAD_SIZE)
    keys = torch.randint(-4, 5, shape, generator=generator)
    values = torch.randint(-4, 5, shape, generator=generator)
    return keys, values


def working_dtype(form: Format) -> torch.dtype:
    return torch.bfloat16 if form.dtype.itemsize == 1 else form.dtype


def plan_of(name: str, prompt_len: int, old_len: int, new_len: int, buffer_size: int) -> RoundPlan:
    return RoundPlan(
        name, 4, stream_key(name, 9), prompt_len, old_len, new_len, buffer_size, num_blocks=0
    )


@pytest.mark.parametrize("back_end", ["native", "pytorch"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("split", [1, 2], ids=["", "split-blocks"])
def test_a_round_moves_exactly_what_the_plan_says(
    form: Format, split: int, back_end: BackEnd
) -> None:
    """Write tokens, compact; a cache that had the kept tokens written directly must be equal."""
    rounds = [
        (plan_of("a", 5, 80, 64, 16), list(range(1, 1 + 80 // form.block_size + 1))),
        (plan_of("b", 20, 61, 60, 10), list(range(39, 39 - 61 // form.block_size - 1, -1))),
    ]
    if split == 2:  # a manager block is two blocks of the kernel
        rounds = [
            (plan, [ids[0] // 2 + i for i in range(-(-len(ids) // 2))]) for plan, ids in rounds
        ]
        rounds[1] = (rounds[1][0], [19 - i for i in range(len(rounds[1][1]))])
    layers, heads = np.array([7, 8]), np.arange(2, 2 + NUM_KV_HEADS)
    found = [form.make() for _ in range(NUM_LAYERS)]
    expected = [form.make() for _ in range(NUM_LAYERS)]
    for number, (plan, block_ids) in enumerate(rounds):
        size = form.block_size * split
        ids = torch.tensor(block_ids)
        slots = torch.arange(plan.old_len)
        kernel_blocks = ids[slots // size] * split + slots % size // form.block_size
        mapping = kernel_blocks * form.block_size + slots % form.block_size
        evicted = plan.evicted_slots(layers, heads)
        for layer in range(NUM_LAYERS):
            keys, values = tokens(plan.old_len, 10 * number + layer)
            keys, values = keys.to(working_dtype(form)), values.to(working_dtype(form))
            form.write(keys, values, found[layer], mapping)
            for head in range(NUM_KV_HEADS):
                gone = evicted[layer, head].tolist()
                holes = [slot for slot in gone if slot < plan.new_len]
                sources = [s for s in range(plan.new_len, plan.old_len) if s not in gone]
                assert len(holes) == len(sources)
                keys[holes, head], values[holes, head] = keys[sources, head], values[sources, head]
            form.write(keys, values, expected[layer], mapping)
    compactor = make_compactor(
        back_end,
        found,
        form.layout(found[0]),
        layers=layers.tolist(),
        first_kv_head=2,
        manager_block_size=form.block_size * split,
    )
    for _ in range(2):  # carrying the plans out again changes nothing
        compactor.compact(rounds)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        num_pairs = NUM_LAYERS * NUM_KV_HEADS * 17
        assert compactor.take_progress().pairs == PairCounts(num_pairs, num_pairs)
    assert compactor.take_progress().pairs == PairCounts(0, 0)


def test_deriving_a_layout_leaves_the_cache_alone() -> None:
    form = packed("vec", 32, torch.float32)
    cache = form.make().fill_(3)
    form.layout(cache)
    assert (cache == 3).all()


@pytest.mark.parametrize(("isa", "block_size"), [("vec16", 16), ("vec16", 48), ("vec", 64)])
def test_unpaired_cpu_layouts_are_transposed_keys_then_plain_values(
    isa: str, block_size: int
) -> None:
    cache = torch.zeros(4, NUM_KV_HEADS, block_size, 2 * HEAD_SIZE)
    layout = packed(isa, block_size, torch.float32).layout(cache)
    slot, dim = np.arange(block_size)[:, None], np.arange(HEAD_SIZE)[None]
    keys = layout.key_slot_offsets[:, None] + layout.key_dim_offsets
    values = layout.value_slot_offsets[:, None] + layout.value_dim_offsets
    assert (keys == dim * block_size + slot).all()
    assert (values == block_size * HEAD_SIZE + slot * HEAD_SIZE + dim).all()


def test_a_layout_that_is_not_separable_is_refused() -> None:
    form = packed("vec", 32, torch.float32)

    def swap_two(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        form.write(keys, values, cache, slots)
        flat = cache[1].view(-1)
        flat[[0, 1]] = flat[[1, 0]].clone()

    with pytest.raises(RandKVLayoutError):
        derived_layout(form.make(), swap_two)


def test_a_layout_that_mixes_heads_is_refused() -> None:
    form = strided("NHD", 16, torch.float32)

    def write(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        as_nhd = cache.view(-1, 16, NUM_KV_HEADS, 2 * HEAD_SIZE).transpose(1, 2)
        form.write(keys, values, as_nhd, slots)

    with pytest.raises(RandKVLayoutError):
        derived_layout(torch.zeros(4, NUM_KV_HEADS, 16, 2 * HEAD_SIZE), write)


@pytest.mark.parametrize("shape", [(4, 16, 64), (4, 2, 16, 63)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RandKVLayoutError, match="2 \\* head_size"):
        strided_layout(torch.zeros(shape))
