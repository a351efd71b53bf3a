# SPDX-License-Identifier: Apache-2.0
"""The engine client as vLLM's routers see it, noting what it does for each HTTP request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from server.record import RequestRecord, current
from server.sampling_limits import check_sampling


class ReportingEngine:
    """Everything of `client`, but `generate` also writes to the current `RequestRecord`.

    It refuses what vLLM's validation lets through and its workers do not survive.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        check_sampling(prompt, sampling_params, self._client)
        outputs = self._client.generate(prompt, sampling_params, request_id, **options)
        record = current.get()
        if record is None:
            return outputs
        is_delta = sampling_params.output_kind == RequestOutputKind.DELTA
        is_constrained = sampling_params.structured_outputs is not None
        return _noted(record, outputs, request_id, is_delta, is_constrained)


async def _noted(
    record: RequestRecord,
    outputs: AsyncGenerator[RequestOutput, None],
    request_id: str,
    is_delta: bool,
    is_constrained: bool,
) -> AsyncGenerator[RequestOutput, None]:
    record.open_samples += 1
    completion_tokens = 0
    is_first = True
    async with aclosing(outputs):
        async for output in outputs:
            if is_first:
                is_first = False
                record.prompt_tokens += len(output.prompt_token_ids or ())
                if record.first_token is None and is_delta:
                    record.first_token = time.monotonic()
            num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
            record.completion_tokens += num_tokens - (0 if is_delta else completion_tokens)
            completion_tokens = num_tokens
            for sample in output.outputs:
                if sample.finish_reason == "error" and is_constrained:
                    raise VLLMValidationError(
                        "structured_outputs, or the format or tools it was made from: the engine "
                        "cannot compile or follow it. Simplify it.",
                        parameter="structured_outputs",
                    )
                if sample.finish_reason is not None:
                    record.finish_reasons.add(sample.finish_reason)
                if sample.kv_cache is not None:
                    record.reports[request_id, sample.index] = sample.kv_cache
            if output.finished:
                record.open_samples -= 1
            yield output
