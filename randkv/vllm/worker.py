# SPDX-License-Identifier: Apache-2.0
"""Worker side, what both model runners share: the compactor, rounds, and what they did.

`RunnerV1Policy` and `RunnerV2Policy` add where their runner keeps block ids, and how absolute
lengths become physical ones.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from randkv.compactor import Compactor, PairCounts, make_compactor
from randkv.errors import RandKVLayoutError
from randkv.kv_layout import KVLayout, WriteTokens, derived_layout, strided_layout
from randkv.planner import RoundPlan
from randkv.stats import CompactionStats
from randkv.vllm.ranks import first_kv_head, is_reporting
from randkv.vllm.support import refuse_unsupported_layers

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

logger = init_logger(__name__)

_STRIDED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")


class WorkerPolicy(ABC):
    """One per model runner.

    Attributes:
        compactor: Carries out rounds; None until `bind`.
        num_rounds: Rounds carried out.
        pairs: (token, KV head) pairs evicted and copied, over all layers.
        seconds: Time spent compacting, as seen by the host.
    """

    def __init__(self) -> None:
        self.compactor: Compactor | None = None
        self._evicted_tokens: dict[str, int] = {}
        self.num_rounds = 0
        self.pairs = PairCounts(0, 0)
        self.seconds = 0.0
        self._untold: CompactionStats | None = None

    def bind(self, runner: RunnerV1 | RunnerV2) -> None:
        """Called once the KV cache exists: check its layout and make the compactor.

        Raises:
            RandKVLayoutError: The layout cannot be compacted.
            RandKVUnsupportedError: The model's attention layers cannot run under the policy.
        """
        groups = runner.kv_cache_config.kv_cache_groups
        context = runner.compilation_config.static_forward_context
        names = groups[0].layer_names
        layers = [context[name] for name in names]
        shared = {
            name: target
            for name, layer in context.items()
            if (target := getattr(layer, "kv_sharing_target_layer_name", None))
        }
        refuse_unsupported_layers(len(groups), shared, layers)
        kv_caches = [layer.kv_cache for layer in layers]
        backend = runner.attn_groups[0][0].backend.get_name()
        layout = _layout(runner, backend, kv_caches[0])
        back_end = runner.cache_config.kv_cache_compactor
        self.compactor = make_compactor(
            back_end,
            kv_caches,
            layout,
            layers=[extract_layer_index(name) for name in names],
            first_kv_head=first_kv_head(runner.vllm_config),
            manager_block_size=groups[0].kv_cache_spec.block_size,
        )
        logger.info_once(
            "KV cache policy: %s compactor, %d layers x %d KV heads, %s, block size %d",
            back_end,
            len(names),
            layout.num_kv_heads,
            backend,
            layout.block_size,
        )

    def run_rounds(self, runner: RunnerV1 | RunnerV2, scheduler_output: SchedulerOutput) -> None:
        """Carry out this step's rounds. Runs before anything else writes to the KV cache.

        Mutates the KV caches, the requests' block ids and their rows of the block table.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._evicted_tokens.pop(request_id, None)
        # A resumed request starts over; the V2 runner is told of it as a new one.
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._evicted_tokens.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._evicted_tokens.pop(request.req_id, None)
        if not scheduler_output.kv_cache_rounds:
            return
        start = time.perf_counter()
        batch: list[tuple[RoundPlan, list[int]]] = []
        for plan in scheduler_output.kv_cache_rounds:
            block_ids = self._block_ids(runner, plan.request_id)
            if plan.block_copies:
                # The target may be a block that an earlier round of this step still reads.
                self._compact(batch)
                batch = []
                self._copy_blocks(runner, plan, block_ids)
            batch.append((plan, list(block_ids)))
            del block_ids[plan.num_blocks :]
            self._rewrite_row(runner, plan, block_ids)
            evicted = self._evicted_tokens.get(plan.request_id, 0)
            self._evicted_tokens[plan.request_id] = evicted + plan.old_len - plan.new_len
        self._compact(batch)
        seconds = time.perf_counter() - start
        self.num_rounds += len(scheduler_output.kv_cache_rounds)
        self.seconds += seconds
        self.collect([seconds])

    def take_stats(self) -> CompactionStats | None:
        """What was done since the last time; None when nothing was."""
        self.collect()
        stats, self._untold = self._untold, None
        return stats

    def collect(self, host_seconds: Sequence[float] = ()) -> PairCounts:
        """Note what the compactor has finished, which on a GPU lags behind what it was given.

        Returns:
            `pairs`, all of them so far.
        """
        assert self.compactor is not None
        (evicted, copied), device_seconds = self.compactor.take_progress()
        seconds = host_seconds if device_seconds is None else device_seconds
        if evicted or seconds:
            self.pairs = PairCounts(self.pairs.evicted + evicted, self.pairs.copied + copied)
            if is_reporting():
                self._untold = stats = self._untold or CompactionStats()
                stats.evicted_pairs += evicted
                stats.copied_pairs += copied
                stats.seconds.extend(seconds)
        return self.pairs

    def _compact(self, batch: list[tuple[RoundPlan, list[int]]]) -> None:
        if batch:
            assert self.compactor is not None
            self.compactor.compact(batch)

    @staticmethod
    def _copy_blocks(runner: RunnerV1 | RunnerV2, plan: RoundPlan, block_ids: list[int]) -> None:
        copies = [KVCacheBlockCopy(c.source, c.target) for c in plan.block_copies]
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, copies)
        for copy in plan.block_copies:
            block_ids[copy.index] = copy.target

    @abstractmethod
    def _block_ids(self, runner: Any, request_id: str) -> list[int]:
        """The request's block ids in slot order; the runner's own list, to be changed in place."""

    @abstractmethod
    def _rewrite_row(self, runner: Any, plan: RoundPlan, block_ids: list[int]) -> None:
        """Make the request's row of the block table `block_ids`, which the round has changed."""


def _layout(runner: RunnerV1 | RunnerV2, backend: str, kv_cache: torch.Tensor) -> KVLayout:
    if backend == "CPU_ATTN":
        return _cpu_layout(runner, kv_cache)
    if backend in _STRIDED_BACKENDS:
        return strided_layout(kv_cache)
    raise RandKVLayoutError(
        f"attention backend {backend}: kv_cache_policy knows the KV cache layout of CPU_ATTN, "
        f"{', '.join(_STRIDED_BACKENDS)}. Choose one with --attention-backend."
    )


def _cpu_layout(runner: RunnerV1 | RunnerV2, kv_cache: torch.Tensor) -> KVLayout:
    builder = runner.attn_groups[0][0].get_metadata_builder()
    return derived_layout(kv_cache, cpu_writer(builder.isa, builder.kv_cache_dtype))


def cpu_writer(isa: str, kv_cache_dtype: str) -> WriteTokens:
    """How vLLM's CPU backend stores tokens with this instruction set and cache dtype."""

    def write_tokens(
        keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        num_blocks, num_kv_heads, block_size, _ = cache.shape
        halves = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1)
        key_cache, value_cache = halves.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            keys.contiguous(),
            values.contiguous(),
            key_cache,
            value_cache,
            slot_mapping,
            isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype=kv_cache_dtype,
        )

    return write_tokens
