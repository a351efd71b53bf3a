# SPDX-License-Identifier: Apache-2.0
"""Worker side, V1 model runner: carries out rounds, turns absolute lengths into physical ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from randkv.compactor.base import Compactor, PairCounts
from randkv.compactor.pytorch import PyTorchCompactor
from randkv.errors import RandKVLayoutError
from randkv.kv_layout import KVLayout, WriteTokens, derived_layout, strided_layout
from randkv.planner import RoundPlan
from randkv.stats import CompactionStats
from randkv.vllm.ranks import first_kv_head, is_reporting
from randkv.vllm.support import refuse_unsupported_layers

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

_STRIDED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")


class WorkerPolicy:
    """One per model runner.

    Attributes:
        num_rounds: Rounds carried out.
        pairs: (token, KV head) pairs evicted and copied, over all layers.
        seconds: Time spent compacting, as seen by the host.
    """

    def __init__(self) -> None:
        self._compactor: Compactor | None = None
        self._evicted_tokens: dict[str, int] = {}
        self.num_rounds = 0
        self.pairs = PairCounts(0, 0)
        self.seconds = 0.0
        self._untold: CompactionStats | None = None

    def bind(self, runner: GPUModelRunner) -> None:
        """Called once the KV cache exists: check its layout and make the compactor.

        Raises:
            RandKVLayoutError: The layout cannot be compacted.
            RandKVUnsupportedError: The model's attention layers cannot run under the policy.
        """
        groups = runner.kv_cache_config.kv_cache_groups
        context = runner.compilation_config.static_forward_context
        names = groups[0].layer_names
        layers = [context[name] for name in names]
        refuse_unsupported_layers(len(groups), runner.shared_kv_cache_layers, layers)
        kv_caches = [layer.kv_cache for layer in layers]
        backend = runner.attn_groups[0][0].backend.get_name()
        layout = _layout(runner, backend, kv_caches[0])
        self._compactor = PyTorchCompactor(
            kv_caches,
            layout,
            layers=[extract_layer_index(name) for name in names],
            first_kv_head=first_kv_head(runner.vllm_config),
            manager_block_size=groups[0].kv_cache_spec.block_size,
        )
        logger.info_once(
            "KV cache policy: PyTorch compactor, %d layers x %d KV heads, %s, block size %d",
            len(names),
            layout.num_kv_heads,
            backend,
            layout.block_size,
        )

    def run_rounds(self, runner: GPUModelRunner, scheduler_output: SchedulerOutput) -> None:
        """Carry out this step's rounds. Runs before anything else writes to the KV cache.

        Mutates the KV caches, the requests' block ids and their rows of the block table.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._evicted_tokens.pop(request_id, None)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._evicted_tokens.pop(request_id, None)
        if not scheduler_output.kv_cache_rounds:
            return
        start = time.perf_counter()
        before = self.pairs
        batch: list[tuple[RoundPlan, list[int]]] = []
        for plan in scheduler_output.kv_cache_rounds:
            block_ids = runner.requests[plan.request_id].block_ids[0]
            if plan.block_copies:
                # The target may be a block that an earlier round of this step still reads.
                self._compact(batch)
                batch = []
                self._copy_blocks(runner, plan, block_ids)
            batch.append((plan, list(block_ids)))
            del block_ids[plan.num_blocks :]
            row = runner.input_batch.req_id_to_index.get(plan.request_id)
            if row is not None:
                runner.input_batch.block_table.add_row((block_ids,), row)
            evicted = self._evicted_tokens.get(plan.request_id, 0)
            self._evicted_tokens[plan.request_id] = evicted + plan.old_len - plan.new_len
        self._compact(batch)
        seconds = time.perf_counter() - start
        self.num_rounds += len(scheduler_output.kv_cache_rounds)
        self.seconds += seconds
        if not is_reporting():
            return
        self._untold = stats = self._untold or CompactionStats()
        stats.evicted_pairs += self.pairs.evicted - before.evicted
        stats.copied_pairs += self.pairs.copied - before.copied
        stats.seconds.append(seconds)

    def take_stats(self) -> CompactionStats | None:
        """What was done since the last time; None when nothing was."""
        stats, self._untold = self._untold, None
        return stats

    def _compact(self, batch: list[tuple[RoundPlan, list[int]]]) -> None:
        if batch:
            assert self._compactor is not None
            counts = self._compactor.compact(batch)
            self.pairs = PairCounts(
                self.pairs.evicted + counts.evicted, self.pairs.copied + counts.copied
            )

    @staticmethod
    def _copy_blocks(runner: GPUModelRunner, plan: RoundPlan, block_ids: list[int]) -> None:
        copies = [KVCacheBlockCopy(c.source, c.target) for c in plan.block_copies]
        copy_kv_cache_blocks_inplace(runner.kv_caches, runner.kv_cache_config.num_blocks, copies)
        for copy in plan.block_copies:
            block_ids[copy.index] = copy.target

    def to_physical(
        self,
        runner: GPUModelRunner,
        num_reqs: int,
        req_indices: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Positions as slots; also makes the runner's sequence lengths physical.

        Mutates ``runner.seq_lens`` and ``runner.optimistic_seq_lens_cpu``; positions stay as they
        are, since rotary embeddings need them absolute.

        Args:
            req_indices: int64 ``[tokens]``, each token's row of the batch, on the device.
            positions: int64 ``[tokens]``, absolute, on the device.
        """
        evicted = self._evicted_tokens
        if not evicted:
            return positions
        ids = runner.input_batch.req_ids[:num_reqs]
        counts = np.array([evicted.get(i, 0) for i in ids], np.int32)
        device = async_tensor_h2d(counts, device=positions.device)
        runner.optimistic_seq_lens_cpu[:num_reqs] -= torch.from_numpy(counts)
        runner.seq_lens[:num_reqs] -= device
        return positions - device[req_indices]


def _layout(runner: GPUModelRunner, backend: str, kv_cache: torch.Tensor) -> KVLayout:
    if backend == "CPU_ATTN":
        return _cpu_layout(runner, kv_cache)
    if backend in _STRIDED_BACKENDS:
        return strided_layout(kv_cache)
    raise RandKVLayoutError(
        f"attention backend {backend}: kv_cache_policy knows the KV cache layout of CPU_ATTN, "
        f"{', '.join(_STRIDED_BACKENDS)}. Choose one with --attention-backend."
    )


def _cpu_layout(runner: GPUModelRunner, kv_cache: torch.Tensor) -> KVLayout:
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
