# SPDX-License-Identifier: Apache-2.0
"""Which heads a rank holds, and the counts of all ranks of one engine.

Every rank carries out the same plans on its own layers and KV heads, and needs no word from any
other for it: selection is a function of global indices. Only the counts are brought together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from randkv.compactor.base import PairCounts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SECONDS = 1.0
"""Between two questions to the ranks while requests run."""

Ask = Callable[[Callable[[Any], PairCounts]], "Future[Sequence[PairCounts]]"]


def first_kv_head(vllm_config: VllmConfig) -> int:
    """Global index of the first KV head on this tensor-parallel rank.

    With fewer KV heads than ranks, neighbouring ranks hold a replica of the same head.

    Source: ``QKVParallelLinear``, which loads shard ``tp_rank // num_kv_head_replicas``.
    """
    num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    return int(get_tensor_model_parallel_rank() * num_kv_heads // num_ranks)


def is_reporting() -> bool:
    """Whether this pipeline stage sends its output to the scheduler: only the last one does."""
    return bool(get_pp_group().is_last_rank)


def compacted_pairs(worker: Any) -> PairCounts:
    """Runs on every rank: the pairs of its own caches since it started."""
    pairs: PairCounts = worker.model_runner.kv_cache_policy.collect()
    return pairs


class RankCounts:
    """The pairs of all ranks, by questions that no step waits for.

    A rank answers between two steps, with its totals, so that no answer has to arrive for the next
    one to be right. At most one question is open. While requests run, one is asked every `SECONDS`
    and read when the executor has received it on its way to a later step's output; when none runs,
    the answer is waited for, so that the counts of what has finished are complete.

    Args:
        ask: ``Executor.collective_rpc(..., non_block=True)``.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._answer: Future[Sequence[PairCounts]] | None = None
        self._told = PairCounts(0, 0)
        self._is_behind = False
        self._ask_at = 0.0

    def on_compaction(self) -> None:
        """The ranks have carried out rounds since they were last asked."""
        self._is_behind = True

    def take(self, idle: bool) -> PairCounts:
        """Pairs that became known since the last time.

        Args:
            idle: No request is running: nothing is held up by waiting.
        """
        known = self._told
        if self._answer is not None and (idle or self._answer.done()):
            self._read(self._answer)
        if self._is_behind and self._answer is None and (idle or monotonic() >= self._ask_at):
            self._is_behind = False
            self._ask_at = monotonic() + SECONDS
            self._answer = self._ask(compacted_pairs)
            if idle:
                self._read(self._answer)
        return PairCounts(self._told.evicted - known.evicted, self._told.copied - known.copied)

    def _read(self, answer: Future[Sequence[PairCounts]]) -> None:
        evicted, copied = (sum(counts) for counts in zip(*answer.result(), strict=True))
        self._answer, self._told = None, PairCounts(evicted, copied)
