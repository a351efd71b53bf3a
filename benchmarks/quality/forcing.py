# SPDX-License-Identifier: Apache-2.0
"""Forced output: the policy evicts generated tokens, so text to be measured is *generated*.

A request with ``extra_args={"forced_tokens": [...]}`` samples these tokens first, then freely.
vLLM's default log-probabilities (``raw_logprobs``) are taken before logits processors run, so those
that come with a forced token are the model's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELD = "forced_tokens"


class ForcedTokens(LogitsProcessor):
    """For ``logits_processors=[ForcedTokens]``. Output token `i` is ``forced_tokens[i]``."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        forced = (sampling_params.extra_args or {}).get(FIELD)
        if forced is None:
            return
        if not isinstance(forced, list) or not all(type(t) is int and t >= 0 for t in forced):
            raise ValueError(f"{FIELD} is {forced!r}: expected a list of token ids")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        del is_pin_memory
        if vllm_config.model_config.logprobs_mode != "raw_logprobs":
            raise ValueError(
                f"logprobs_mode is {vllm_config.model_config.logprobs_mode!r}: expected "
                '"raw_logprobs", because any other shows forced tokens as certain'
            )
        self._device = device
        # By row of the batch: what is forced, and the request's own growing list of output tokens.
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    @staticmethod
    def _row(
        params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> tuple[list[int], list[int]] | None:
        del prompt
        forced: Any = (params.extra_args or {}).get(FIELD)
        return (forced, output) if forced else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mutates and returns `logits`, ``[requests, vocabulary]``."""
        now = {
            row: forced[len(output)]
            for row, (forced, output) in self._rows.items()
            if len(output) < len(forced)
        }
        if now:
            rows = torch.tensor(list(now), device=self._device)
            logits[rows] = -torch.inf
            logits[rows, torch.tensor(list(now.values()), device=self._device)] = 0.0
        return logits
