# SPDX-License-Identifier: Apache-2.0
"""The oracle: the same weights in Transformers, a full cache, and a mask per (layer, KV head).

Token `t` may attend to position `p` iff ``p <= t`` and no round with ``C <= t`` evicted `p`.
Masking and evicting are the same mathematics, so an engine that evicts must agree to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from randkv.config import RequestPolicy
from randkv.planner import replay

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Comparison:
    """One request against the oracle."""

    num_tokens: int
    num_different: int
    max_logprob_error: float


class Oracle:
    """Teacher-forced float32 forward passes of one model under keep-sets."""

    def __init__(self, model: Path) -> None:
        name = f"oracle_{id(self)}"  # the registry is global, and each oracle has its own masks
        ALL_ATTENTION_FUNCTIONS.register(name, self._attention)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=name
        ).eval()
        config = self._model.config
        self._num_layers = config.num_hidden_layers
        self._num_kv_heads = config.num_key_value_heads
        self._evicted_at = np.empty(0)

    def compare(
        self, policy: RequestPolicy, prompt: list[int], output: list[int], logprobs: list[float]
    ) -> Comparison:
        """Count output tokens that are not the oracle's argmax, and the worst log-probability."""
        tokens = prompt + output
        reference = self.logprobs(policy, len(prompt), tokens[:-1])[len(prompt) - 1 :]
        chosen = torch.tensor(output)
        found = reference.gather(1, chosen[:, None])[:, 0]
        return Comparison(
            num_tokens=len(output),
            num_different=int((reference.argmax(1) != chosen).sum()),
            max_logprob_error=float((found - torch.tensor(logprobs)).abs().max()),
        )

    @torch.no_grad()
    def logprobs(self, policy: RequestPolicy, prompt_len: int, tokens: list[int]) -> torch.Tensor:
        """``[tokens, vocabulary]`` log-probabilities of the next token."""
        shape = (self._num_layers, self._num_kv_heads, len(tokens))
        self._evicted_at = np.full(shape, NEVER)
        if policy.config is not None:
            for done in replay(
                policy.config,
                request_key=policy.request_key,
                prompt_len=prompt_len,
                num_tokens=len(tokens),
                num_layers=self._num_layers,
                num_kv_heads=self._num_kv_heads,
            ):
                np.put_along_axis(
                    self._evicted_at,
                    done.evicted_positions.astype(np.int64),
                    done.computed_tokens,
                    axis=2,
                )
        logits = self._model(torch.tensor([tokens])).logits[0]
        return F.log_softmax(logits, dim=-1)

    def _attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        del attention_mask
        evicted_at = torch.from_numpy(self._evicted_at[module.layer_idx])  # [kv_heads, tokens]
        steps = torch.arange(query.shape[2])
        allowed = (steps[None, :] <= steps[:, None]) & (steps[:, None] < evicted_at[:, None, :])
        group = query.shape[1] // key.shape[1]
        out = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            attn_mask=allowed.repeat_interleave(group, 0)[None],
            scale=scaling,
        )
        return out.transpose(1, 2).contiguous(), None
