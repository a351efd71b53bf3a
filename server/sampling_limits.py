# SPDX-License-Identifier: Apache-2.0
"""What the sampling parameters of a request may hold, once the prompt is tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

# Room that vLLM's GPU workers have for one request; some of the stop tokens are the model's own.
_MOST = {"logit_bias": 1024, "allowed_token_ids": 1024, "stop_token_ids": 120}
_MOST_BAD_WORDS_TOKENS = 1024


def check_sampling(prompt: Any, params: SamplingParams, client: EngineClient) -> None:
    """Refuse what vLLM's validation lets through and its workers do not survive.

    Raises:
        VLLMValidationError: Names the field.
    """
    config = client.model_config
    vocab_size = config.get_vocab_size()
    given = {"stop_token_ids": params.stop_token_ids}
    if isinstance(prompt, Mapping) and not config.is_multimodal_model:
        given["prompt"] = prompt.get("prompt_token_ids")
    for name, ids in given.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            found = min(ids) if min(ids) < 0 else max(ids)
            raise _invalid(name, f"token id {found}", f"0 to {vocab_size - 1}")
    for name, most in _MOST.items():
        num_given = len(getattr(params, name) or ())
        if num_given > most:
            raise _invalid(name, f"{num_given} tokens", f"at most {most}")
    if not params.bad_words:
        return
    if not all(word.strip() for word in params.bad_words):
        raise _invalid("bad_words", "an empty word", "words")
    tokenized = copy(params)
    tokenized.update_from_tokenizer(client.get_tokenizer())
    num_tokens = sum(len(ids) for ids in tokenized.bad_words_token_ids or ())
    if num_tokens > _MOST_BAD_WORDS_TOKENS:
        raise _invalid("bad_words", f"{num_tokens} tokens", f"at most {_MOST_BAD_WORDS_TOKENS}")


def _invalid(param: str, found: str, expected: str) -> VLLMValidationError:
    return VLLMValidationError(f"{param} has {found}: expected {expected}", parameter=param)
