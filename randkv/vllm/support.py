# SPDX-License-Identifier: Apache-2.0
"""The table of engine configurations that the policy cannot run with. One row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from randkv.errors import RandKVUnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Refusal(NamedTuple):
    """`applies` says whether the configuration has the feature; `remedy` what to change."""

    feature: str
    applies: Callable[[VllmConfig], bool]
    remedy: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "pooling models",
        lambda c: c.model_config.runner_type != "generate",
        "serve a generation model",
    ),
    Refusal(
        "encoder-decoder models",
        lambda c: c.model_config.is_encoder_decoder,
        "serve a decoder-only model",
    ),
    Refusal(
        "hybrid (Mamba) models",
        lambda c: c.model_config.is_hybrid,
        "serve a model with full attention in every layer",
    ),
    Refusal(
        "attention-free models",
        lambda c: c.model_config.is_attention_free,
        "serve a model with full attention in every layer",
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "serve a model with multi-head or grouped-query attention",
    ),
    Refusal(
        "sliding-window attention",
        lambda c: c.model_config.get_sliding_window() is not None,
        "serve a model with full attention in every layer",
    ),
    Refusal(
        "chunked local attention",
        lambda c: c.model_config.attention_chunk_size is not None,
        "serve a model with full attention in every layer",
    ),
    Refusal(
        "speculative decoding",
        lambda c: c.speculative_config is not None,
        "remove --speculative-config",
    ),
    Refusal(
        "diffusion models",
        lambda c: c.model_config.is_diffusion,
        "serve an autoregressive model",
    ),
    Refusal(
        "decode context parallelism",
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "set --decode-context-parallel-size 1",
    ),
    Refusal(
        "prefill context parallelism",
        lambda c: c.parallel_config.prefill_context_parallel_size > 1,
        "set --prefill-context-parallel-size 1",
    ),
    Refusal(
        "expert parallelism",
        lambda c: c.parallel_config.enable_expert_parallel,
        "remove --enable-expert-parallel, and experts are sharded by tensor parallelism",
    ),
    Refusal(
        "microbatching (dual batch overlap)",
        lambda c: c.parallel_config.use_ubatching,
        "remove --enable-dbo and --ubatch-size",
    ),
    Refusal(
        "KV connectors and KV transfer",
        lambda c: c.kv_transfer_config is not None or c.cache_config.kv_offloading_size is not None,
        "remove --kv-transfer-config and --kv-offloading-size",
    ),
    Refusal(
        "KV sharing fast prefill",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "remove --kv-sharing-fast-prefill",
    ),
    Refusal(
        "nvfp4 KV caches",
        lambda c: c.cache_config.cache_dtype.startswith("nvfp4"),
        "set --kv-cache-dtype auto",
    ),
    Refusal(
        "quantised KV caches with per-token scales",
        lambda c: (
            "per_token" in c.cache_config.cache_dtype
            or c.cache_config.cache_dtype.startswith("turboquant")
        ),
        "set --kv-cache-dtype auto",
    ),
    Refusal(
        "partial-block prefix matching",
        lambda c: c.cache_config.prefix_match_unit is not None,
        "remove --prefix-match-unit",
    ),
    Refusal(
        "returning routed experts",
        lambda c: c.model_config.enable_return_routed_experts,
        "remove --enable-return-routed-experts",
    ),
)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises RandKVUnsupportedError that lists every row of `REFUSALS` that applies."""
    if vllm_config.model_config is None:
        return
    reasons = [f"{r.feature}: {r.remedy}" for r in REFUSALS if r.applies(vllm_config)]
    if reasons:
        raise RandKVUnsupportedError(reasons)


def refuse_unsupported_layers(
    num_groups: int, shared_layers: Mapping[str, str], layers: Sequence[Any]
) -> None:
    """What only the loaded model tells: called on the worker when the KV cache exists.

    Args:
        num_groups: KV cache groups.
        shared_layers: Layers that use another layer's KV cache.
        layers: vLLM's attention layers, with their `impl` and `kv_cache`.

    Raises:
        RandKVUnsupportedError: Lists every reason.
    """
    kinds = {(kv.shape, kv.stride(), kv.dtype) for kv in (layer.kv_cache for layer in layers)}
    impls = [layer.impl for layer in layers]
    found = {
        f"{num_groups} KV cache groups": num_groups != 1,
        "cross-layer KV sharing": bool(shared_layers),
        "layers with KV caches of different shapes or types": len(kinds) != 1,
        "ALiBi, which reads positions off slots": any(
            getattr(impl, "alibi_slopes", None) is not None for impl in impls
        ),
        "sliding-window layers": any(
            getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1)) for impl in impls
        ),
    }
    reasons = [
        f"{feature}: serve a model with full attention, rotary positions and the same KV cache "
        "in every layer"
        for feature, applies in found.items()
        if applies
    ]
    if reasons:
        raise RandKVUnsupportedError(reasons)
