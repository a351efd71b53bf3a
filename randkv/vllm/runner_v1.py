# SPDX-License-Identifier: Apache-2.0
"""Worker side of vLLM's V1 model runner (``v1/worker/gpu_model_runner.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from randkv.planner import RoundPlan
from randkv.vllm.worker import WorkerPolicy

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RunnerV1Policy(WorkerPolicy):
    """The runner keeps block ids with its requests, and rows of the block table on the host."""

    def _block_ids(self, runner: GPUModelRunner, request_id: str) -> list[int]:
        block_ids: list[int] = runner.requests[request_id].block_ids[0]
        return block_ids

    def _rewrite_row(self, runner: GPUModelRunner, plan: RoundPlan, block_ids: list[int]) -> None:
        row = runner.input_batch.req_id_to_index.get(plan.request_id)
        if row is not None:
            runner.input_batch.block_table.add_row((block_ids,), row)

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
