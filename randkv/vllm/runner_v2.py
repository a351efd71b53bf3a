# SPDX-License-Identifier: Apache-2.0
"""Worker side of vLLM's V2 model runner (``v1/worker/gpu/model_runner.py``).

CUDA graphs are captured with the runner's own input buffers, whose addresses stay what they are:
everything here changes what they hold, before the forward is enqueued. Nothing waits for the
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.buffer_utils import async_copy_to_gpu

from randkv.planner import RoundPlan
from randkv.vllm.worker import WorkerPolicy

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class RunnerV2Policy(WorkerPolicy):
    """The runner keeps block ids on the device only, so they are noted here as they arrive.

    Rows belong to whichever request comes next; all that is kept here goes by request id.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[str, list[int]] = {}
        self._evicted_in_batch: torch.Tensor | None = None

    def run_rounds(self, runner: GPUModelRunner, scheduler_output: SchedulerOutput) -> None:
        super().run_rounds(runner, scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self._blocks.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            self._blocks[request.req_id] = list(request.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None:
                self._blocks[request_id] += new[0]

    def _block_ids(self, runner: GPUModelRunner, request_id: str) -> list[int]:
        del runner
        return self._blocks[request_id]

    def _rewrite_row(self, runner: GPUModelRunner, plan: RoundPlan, block_ids: list[int]) -> None:
        tables = runner.block_tables
        row = runner.req_states.req_id_to_index[plan.request_id]
        # A block of the manager is this many of the attention kernel.
        parts = tables.blocks_per_kv_block[0]
        tables.num_blocks.np[0, row] = len(block_ids) * parts
        # Not as staged writes: there is room for one of these in each row, and this step's new
        # block ids may need it.
        for copy in plan.block_copies:
            start, target = copy.index * parts, copy.target * parts
            entries = tables.block_tables[0].gpu[row, start : start + parts]
            torch.arange(target, target + parts, out=entries)

    def to_physical(self, batch: InputBatch) -> torch.Tensor:
        """Positions as slots; also makes the batch's sequence lengths physical, for attention.

        Mutates ``batch.seq_lens``, which is the buffer that captured graphs read, and its upper
        bound on the host. Positions stay as they are, since rotary embeddings need them absolute.

        Returns:
            int64 ``[tokens]``, on the device.
        """
        evicted = self._evicted_tokens
        if not evicted:
            return batch.positions
        counts = np.array([evicted.get(i, 0) for i in batch.req_ids], np.int32)
        device = batch.seq_lens.device
        self._evicted_in_batch = async_copy_to_gpu(counts, device=device)
        batch.seq_lens[: batch.num_reqs] -= self._evicted_in_batch
        batch.seq_lens_cpu_upper_bound[: batch.num_reqs] -= torch.from_numpy(counts)
        by_token = async_copy_to_gpu(np.repeat(counts, batch.num_scheduled_tokens), device=device)
        return batch.positions[: batch.num_tokens] - by_token

    def to_absolute(self, batch: InputBatch) -> None:
        """The forward is enqueued: what follows compares lengths with those of prompts.

        Mutates ``batch.seq_lens``.
        """
        if self._evicted_in_batch is not None:
            batch.seq_lens[: batch.num_reqs] += self._evicted_in_batch
            self._evicted_in_batch = None
