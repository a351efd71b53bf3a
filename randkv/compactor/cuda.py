# SPDX-License-Identifier: Apache-2.0
"""The native compactor on NVIDIA GPUs: plans are staged, counters are read when they are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from randkv.compactor.base import PairCounts, Progress
from randkv.compactor.native import ROUND_FIELDS, NativeCompactor, pack_rounds
from randkv.errors import RandKVCompactorError
from randkv.kv_layout import KVLayout
from randkv.planner import RoundPlan

MAX_STAGED = 2**18
"""int32 numbers of one launch: rows of rounds and block ids. More rounds are more launches."""

NUM_STAGES = 4
"""Launches that may be on their way; the engine has at most two steps in flight."""


def parts(
    rounds: Sequence[tuple[RoundPlan, Sequence[int]]], max_staged: int
) -> Iterator[list[tuple[RoundPlan, Sequence[int]]]]:
    """`rounds` in their order, each part at most `max_staged` numbers when packed.

    Raises:
        ValueError: A round alone is more than that.
    """
    part: list[tuple[RoundPlan, Sequence[int]]] = []
    size = 0
    for plan, block_ids in rounds:
        needed = ROUND_FIELDS + len(block_ids)
        if needed > max_staged:
            raise ValueError(f"a round has {len(block_ids)} blocks; {max_staged} numbers fit")
        if size + needed > max_staged:
            yield part
            part, size = [], 0
        part.append((plan, block_ids))
        size += needed
    if part:
        yield part


class _Stage:
    """Pinned memory for one launch's plan and for the counters after it.

    `busy` says that it was used and its counters are not yet read.
    """

    def __init__(self) -> None:
        self.plan = torch.empty(MAX_STAGED, dtype=torch.int32, pin_memory=True)
        self.counters = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        self.began = torch.cuda.Event(enable_timing=True)
        self.ended = torch.cuda.Event(enable_timing=True)
        self.busy = False


class CUDACompactor(NativeCompactor):
    """Enqueues on the current stream. Nothing is allocated after start-up, and nothing waits for
    the device unless `NUM_STAGES` launches are unfinished.

    The counts of a launch are told once the device has passed it, so by the next step as a rule.

    Raises:
        RandKVCompactorError: From `take_progress`: a plan named blocks that the cache does not
            have. Nothing was written there.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        layers: Sequence[int],
        first_kv_head: int,
        manager_block_size: int,
    ) -> None:
        super().__init__(kv_caches, layout, layers, first_kv_head, manager_block_size)
        self._plan = torch.empty(MAX_STAGED, dtype=torch.int32, device=kv_caches[0].device)
        self._stages = [_Stage() for _ in range(NUM_STAGES)]
        self._next = 0
        self._told = [0, 0, 0]
        self._untold = [0, 0, 0]
        self._seconds: list[float] = []

    def compact(self, rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> None:
        for part in parts(rounds, MAX_STAGED):
            self._enqueue(part)

    def _enqueue(self, rounds: Sequence[tuple[RoundPlan, Sequence[int]]]) -> None:
        stage = self._stages[self._next]
        self._next = (self._next + 1) % NUM_STAGES
        if stage.busy:
            stage.ended.synchronize()
            self._read(stage)
        packed = torch.from_numpy(pack_rounds(rounds))
        size = packed.numel()
        stage.plan[:size] = packed
        stage.began.record()
        self._plan[:size].copy_(stage.plan[:size], non_blocking=True)
        self._launch(self._plan[:size], len(rounds))
        stage.counters.copy_(self._counters, non_blocking=True)
        stage.ended.record()
        stage.busy = True

    def _read(self, stage: _Stage) -> None:
        """Note the counters after a launch that the device has passed; they only ever grow."""
        stage.busy = False
        counters = stage.counters.tolist()
        self._untold = [new - old for new, old in zip(counters, self._told, strict=True)]
        self._seconds.append(stage.began.elapsed_time(stage.ended) / 1000)

    def take_progress(self) -> Progress:
        for i in range(NUM_STAGES):  # the oldest first
            stage = self._stages[(self._next + i) % NUM_STAGES]
            if stage.busy:
                if not stage.ended.query():
                    break
                self._read(stage)
        evicted, copied, bad_blocks = self._untold
        self._told = [old + new for old, new in zip(self._told, self._untold, strict=True)]
        self._untold = [0, 0, 0]
        seconds, self._seconds = self._seconds, []
        if bad_blocks:
            raise RandKVCompactorError(
                f"{bad_blocks} moves named blocks outside the KV cache and were left out: the "
                "engine's plans are wrong. Please report it."
            )
        return Progress(PairCounts(evicted, copied), seconds)
