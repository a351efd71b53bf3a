# SPDX-License-Identifier: Apache-2.0
"""The compiled operator: its registration, what it refuses, and how it is packed and loaded."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randkv import compactor
from randkv.compactor import native
from randkv.compactor.cuda import parts
from randkv.errors import RandKVConfigError
from randkv.kv_layout import strided_layout
from randkv.planner import RoundPlan
from randkv.selection import stream_key
from tests.op.back_ends import BUILD, make

PLAN = RoundPlan("a", 3, stream_key("a", 0), 5, 80, 64, 16, num_blocks=4)


def arguments(**changes: Any) -> list[Any]:
    """Of the operator: two layers, one round of five blocks."""
    native.load("cpu")
    caches = [torch.zeros(8, 2, 16, 64) for _ in range(2)]
    packed = torch.from_numpy(native.pack_rounds([(PLAN, [1, 2, 3, 4, 5])]))
    given = {
        "kv_caches": caches,
        "rounds": packed[:8].view(1, 8),
        "block_ids": packed[8:],
        "layers": torch.arange(2, dtype=torch.int32),
        "layout": native.layout_numbers(strided_layout(caches[0])),
        "first_kv_head": 0,
        "manager_block_size": 16,
        "counters": torch.zeros(3, dtype=torch.int64),
    }
    assert changes.keys() <= given.keys()
    return list((given | changes).values())


def test_the_operator_is_registered_as_pytorch_wants_it() -> None:
    """Its schema tells what it mutates, it has a fake kernel, and both hold when it runs."""
    given = arguments()
    torch.library.opcheck(torch.ops.randkv.compact.default, given)


@pytest.mark.parametrize("is_portable", [False, True], ids=["avx512_if_there", "portable"])
def test_both_ways_to_select_agree_with_the_plan(is_portable: bool) -> None:
    """Also where all candidates go, and where their number is no multiple of 16."""
    make("parts")
    parts = ctypes.CDLL(str(BUILD / "libparts.so"))
    rng = np.random.default_rng(7)
    for index, extra in enumerate([0] * 48 + [1, 15, 16, 17, 300, 2000] * 8):
        num_evict = index + 1
        num_candidates = num_evict + extra
        prompt_len, buffer_size = int(rng.integers(1, 70)), int(rng.integers(0, 40))
        old_len = prompt_len + num_candidates + buffer_size
        plan = RoundPlan(
            "a", index, stream_key("a", index), prompt_len, old_len, old_len - num_evict,
            buffer_size, num_blocks=99,
        )  # fmt: skip
        expected = plan.evicted_slots(np.arange(3), np.arange(2))
        found = np.zeros(expected.shape, np.int32)
        packed = native.pack_rounds([(plan, [])])
        parts.randkv_select(packed.ctypes, 3, 2, found.ctypes, is_portable)
        np.testing.assert_array_equal(found, expected)


def row(**changes: int) -> torch.Tensor:
    values = {"key0": 1, "key1": 2, "round_index": 0, "first_slot": 5, "stop_slot": 64}
    values |= {"old_len": 80, "new_len": 64, "first_block": 0}
    assert changes.keys() <= values.keys()
    return torch.tensor([list((values | changes).values())], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"block_ids": torch.tensor([1, 2, 8, 4, 5], dtype=torch.int32)}, "block id 8, but .* 8"),
        ({"block_ids": torch.tensor([1, 2, -1, 4, 5], dtype=torch.int32)}, "block id -1"),
        ({"block_ids": torch.tensor([1, 2, 3, 4], dtype=torch.int32)}, "needs 5 block ids"),
        ({"block_ids": torch.tensor([1, 2, 3, 4, 5])}, "block_ids must be .* int32"),
        ({"rounds": row(first_block=-1)}, "needs 5 block ids"),
        ({"rounds": row(first_block=1)}, "needs 5 block ids"),
        ({"rounds": row(stop_slot=81)}, "evicts 16 of the slots"),
        ({"rounds": row(first_slot=50)}, "evicts 16 of the slots"),
        ({"rounds": row(first_slot=-1)}, "evicts 16 of the slots"),
        ({"rounds": row(new_len=81)}, "evicts -1 of the slots"),
        ({"rounds": row()[:, :7].contiguous()}, "\\[rounds, 8\\]"),
        ({"kv_caches": []}, "0 KV caches"),
        ({"layers": torch.arange(3, dtype=torch.int32)}, "2 KV caches, but 3 layers"),
        ({"manager_block_size": 24}, "24 is not a multiple of block size 16"),
        ({"counters": torch.zeros(2, dtype=torch.int64)}, "counters must be"),
        ({"layout": torch.zeros(7, dtype=torch.int64)}, "layout of 7 numbers"),
        (
            {"layout": native.layout_numbers(strided_layout(torch.zeros(8, 2, 8, 64)))},
            "not that of the KV caches",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_bad_arguments_are_refused_and_nothing_is_written(
    changes: dict[str, Any], told: str
) -> None:
    given = arguments(**changes)
    for cache in given[0]:
        cache.fill_(1)
    with pytest.raises(RuntimeError, match=told):
        torch.ops.randkv.compact(*given)
    assert all((cache == 1).all() for cache in given[0])
    assert not given[-1].any()


def test_the_row_is_that_of_the_header() -> None:
    """Field by field, in the order of csrc/round.h."""
    header = (Path(__file__).parents[2] / "csrc/round.h").read_text()
    body = header[header.index("struct Round {") : header.index("static_assert")]
    fields = [name for line in re.findall(r"int32_t ([\w, ]+);", body) for name in line.split(", ")]
    packed = native.pack_rounds([(PLAN, [9, 8]), (PLAN, [7])])
    assert len(fields) == native.ROUND_FIELDS
    assert dict(zip(fields, packed[8:16].view(np.uint32).tolist(), strict=True)) == {
        "key0": PLAN.key.k0,
        "key1": PLAN.key.k1,
        "round_index": 3,
        "first_slot": 5,
        "stop_slot": 64,
        "old_len": 80,
        "new_len": 64,
        "first_block": 2,
    }
    assert packed[16:].tolist() == [9, 8, 7]


def test_staged_plans_are_split_in_their_order() -> None:
    rounds = [(PLAN, list(range(n))) for n in (2, 3, 10, 1, 0)]
    found = list(parts(rounds, 21))
    assert [len(part) for part in found] == [2, 1, 2]
    assert [one for part in found for one in part] == rounds
    assert all(len(native.pack_rounds(part)) <= 21 for part in found)
    assert list(parts([], 21)) == []
    with pytest.raises(ValueError, match="14 blocks; 21 numbers"):
        list(parts([(PLAN, range(14))], 21))


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(RandKVConfigError, match="'native' or 'pytorch'"):
        compactor.check("cuda", "cpu")


def test_a_library_that_does_not_load_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """In a process of its own: missing, not a library, no CUDA. Never PyTorch instead."""
    script = f"""
import pathlib
import shutil
from randkv import compactor
from randkv.compactor import native
native.LIBRARIES = pathlib.Path({str(tmp_path)!r})
for content in (None, b"not a library"):
    if content:
        (native.LIBRARIES / "librandkv_cpu.so").write_bytes(content)
    try:
        compactor.check("native", "cpu")
    except native.RandKVCompactorError as error:
        print(error)
compactor.check("pytorch", "cpu")
shutil.copy({str(native.LIBRARIES / "librandkv_cpu.so")!r}, native.LIBRARIES)
compactor.check("native", "cpu")
try:
    compactor.check("native", "cuda")
except native.RandKVCompactorError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    texts = result.stdout.strip().splitlines()
    assert len(texts) == 3
    for text, name in zip(texts, ("cpu", "cpu", "cuda"), strict=True):
        assert str(tmp_path / f"librandkv_{name}.so") in text
        assert f"make -C csrc {name}" in text
        assert "--kv-cache-compactor pytorch" in text
