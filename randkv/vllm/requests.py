# SPDX-License-Identifier: Apache-2.0
"""A request's policy on its way in: validated before the engine sees the request."""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest

from randkv.config import EnginePolicy, RequestPolicy
from randkv.errors import RandKVConfigError

FIELD = "kv_cache_policy"


class RequestPolicyError(VLLMValidationError, RandKVConfigError):
    """A bad policy on one request: a client error to vLLM's servers, a ValueError to `LLM`."""

    def __init__(self, field: str, *details: Any) -> None:
        RandKVConfigError.__init__(self, field, *details)
        self.parameter = field

    def __str__(self) -> str:
        return str(self.args[0])


def resolve(policy: EnginePolicy | None, request: EngineCoreRequest, resumable: bool) -> None:
    """Put the resolved policy into ``extra_args``, where the engine core reads it.

    Mutates `request.sampling_params`, which is the engine's own copy, but never the caller's
    ``extra_args``.
    """
    params = request.sampling_params
    override = None
    if params is not None and params.extra_args is not None:
        override = params.extra_args.get(FIELD)
    if policy is None:
        if override is not None:
            raise RequestPolicyError(
                FIELD,
                override,
                "no override: the engine runs without kv_cache_policy",
                'Start it with kv_cache_policy="randkv" or "dense".',
                "not_allowed",
            )
        return
    if params is None:
        raise RequestPolicyError(
            FIELD,
            policy.default,
            "a generation request",
            "Pooling runs without kv_cache_policy.",
            "not_allowed",
        )
    try:
        resolved = policy.resolve(
            override,
            seed=params.seed,
            request_id=request.request_id,
            prompt_len=length_from_prompt_token_ids_or_embeds(
                request.prompt_token_ids, request.prompt_embeds
            ),
        )
    except RandKVConfigError as error:
        raise RequestPolicyError(
            error.field, error.value, error.expected, error.remedy, error.reason
        ) from None
    if resumable and resolved.config is not None:
        raise RequestPolicyError(
            FIELD,
            "randkv",
            '"dense" for a streaming-input session',
            "Its prompt grows after generation began, so what the prompt is cannot be known.",
            "not_allowed",
        )
    params.extra_args = {**(params.extra_args or {}), FIELD: resolved.to_dict()}


def beam_search_error() -> RequestPolicyError:
    return RequestPolicyError(
        FIELD,
        "randkv",
        '"dense" for beam search',
        "Every beam step would be a new request with a longer prompt. "
        'Use an engine started with kv_cache_policy="dense", or sampling with n > 1.',
        "not_allowed",
    )


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """`params` with the request key of sample `index`; `params` itself when there is no policy."""
    if not params.extra_args or params.extra_args.get(FIELD) is None:
        return params
    policy = RequestPolicy.from_dict(params.extra_args[FIELD]).child(index)
    child = copy(params)
    child.extra_args = {**params.extra_args, FIELD: policy.to_dict()}
    return child
