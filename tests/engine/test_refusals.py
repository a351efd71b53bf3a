# SPDX-License-Identifier: Apache-2.0
"""Configurations that are refused at start-up, all reasons at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, MistralConfig, MistralForCausalLM
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from vllm.engine.arg_utils import EngineArgs

from randkv.errors import RandKVConfigError, RandKVPatchError, RandKVUnsupportedError
from randkv.vllm.support import REFUSALS, refuse_unsupported, refuse_unsupported_layers
from tests.engine.harness import DEFAULTS, Engine
from tests.engine.models import make_qwen3_moe_model


def config_of(model: Path, **options: Any) -> Any:
    arguments = {**DEFAULTS, "skip_tokenizer_init": True, "kv_cache_policy": "randkv", **options}
    arguments.pop("disable_log_stats")
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({"kv_offloading_size": 1.0}, "KV connectors"),
        ({"kv_sharing_fast_prefill": True}, "KV sharing fast prefill"),
    ],
)
def test_a_refused_option_is_named(tiny_model: Path, options: dict[str, Any], feature: str) -> None:
    with pytest.raises(Exception, match=feature) as caught:
        config_of(tiny_model, **options)
    assert "kv_cache_policy cannot be used" in str(caught.value)
    config_of(tiny_model)


def test_all_reasons_are_listed_at_once(tiny_model: Path) -> None:
    with pytest.raises(Exception, match="kv_cache_policy cannot be used") as caught:
        config_of(tiny_model, kv_offloading_size=1.0, kv_sharing_fast_prefill=True)
    assert "--kv-offloading-size" in str(caught.value)
    assert "--kv-sharing-fast-prefill" in str(caught.value)


def test_expert_parallelism_is_refused_and_tensor_parallelism_is_not(tmp_path: Path) -> None:
    model = make_qwen3_moe_model(tmp_path)
    config_of(model, tensor_parallel_size=2)
    with pytest.raises(Exception, match="remove --enable-expert-parallel"):
        config_of(model, tensor_parallel_size=2, enable_expert_parallel=True)


def test_every_row_of_the_table_refuses(tiny_model: Path) -> None:
    """Each row's condition, met alone, is reported; none is met by a plain configuration."""
    plain = config_of(tiny_model)
    refuse_unsupported(plain)
    changes: dict[str, dict[str, Any]] = {
        "pooling models": {"model_config": {"runner_type": "pooling"}},
        "encoder-decoder models": {"model_config": {"is_encoder_decoder": True}},
        "hybrid (Mamba) models": {"model_config": {"is_hybrid": True}},
        "attention-free models": {"model_config": {"is_attention_free": True}},
        "multi-head latent attention (MLA)": {"model_config": {"use_mla": True}},
        "sliding-window attention": {"model_config": {"get_sliding_window": lambda: 128}},
        "chunked local attention": {"model_config": {"attention_chunk_size": 8192}},
        "speculative decoding": {"speculative_config": object()},
        "diffusion models": {"model_config": {"is_diffusion": True}},
        "decode context parallelism": {"parallel_config": {"decode_context_parallel_size": 2}},
        "prefill context parallelism": {"parallel_config": {"prefill_context_parallel_size": 2}},
        "expert parallelism": {"parallel_config": {"enable_expert_parallel": True}},
        "microbatching (dual batch overlap)": {"parallel_config": {"use_ubatching": True}},
        "KV connectors and KV transfer": {"kv_transfer_config": object()},
        "KV sharing fast prefill": {"cache_config": {"kv_sharing_fast_prefill": True}},
        "nvfp4 KV caches": {"cache_config": {"cache_dtype": "nvfp4"}},
        "quantised KV caches with per-token scales": {
            "cache_config": {"cache_dtype": "fp8_per_token_head"}
        },
        "partial-block prefix matching": {"cache_config": {"prefix_match_unit": 8}},
        "returning routed experts": {"model_config": {"enable_return_routed_experts": True}},
    }
    assert set(changes) == {row.feature for row in REFUSALS}
    for feature, change in changes.items():
        with pytest.raises(RandKVUnsupportedError) as caught:
            refuse_unsupported(_changed(plain, change))
        assert [reason.split(":")[0] for reason in caught.value.reasons] == [feature]
        assert caught.value.reasons[0].split(": ")[1]


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """`config` seen through a proxy that answers `changes` first."""

    class Proxy(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return getattr(config, name)

    answers = {
        name: _changed(getattr(config, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return Proxy(**answers)


def test_the_v2_model_runner_is_left_to_vllm(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the policy keeps vLLM from picking it; here it is the lack of Triton."""
    config = config_of(tiny_model)
    assert config._get_v2_model_runner_unsupported_features() == []
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):
        config_of(tiny_model)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_cache_policy": "rand"}, "kv_cache_policy"),
        ({"kv_cache_policy": {"type": "randkv", "budget": -1}}, "kv_cache_policy.budget"),
        ({"kv_cache_policy_limits": {"budget": [1, 8]}}, "kv_cache_policy.budget"),
        ({"kv_cache_policy_limits": "x"}, "kv_cache_policy_limits"),
        ({"kv_cache_policy": None, "kv_cache_policy_limits": {}}, "kv_cache_policy_limits"),
    ],
)
def test_a_bad_policy_stops_the_start_with_the_field_named(
    tiny_model: Path, options: dict[str, Any], field: str
) -> None:
    with pytest.raises((RandKVConfigError, ValueError), match=field):
        config_of(tiny_model, **options)


def test_an_unpatched_vllm_stops_the_start(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from randkv import patching

    monkeypatch.setattr(patching, "find_vllm", lambda: tmp_path)
    with pytest.raises(RandKVPatchError, match="not patched"):
        config_of(tiny_model)
    config_of(tiny_model, kv_cache_policy=None)


def test_sliding_window_models_are_refused(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
        max_position_embeddings=2048,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="sliding-window attention"):
        config_of(tmp_path)


def test_alibi_models_are_refused_when_their_layers_are_known(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=512, hidden_size=64, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RandKVUnsupportedError, match="ALiBi"):
        Engine(tmp_path, kv_cache_policy={"type": "randkv", "budget": 32, "buffer_size": 8})


def test_layers_that_differ_are_refused() -> None:
    def layer(heads: int, **impl: Any) -> Any:
        return SimpleNamespace(kv_cache=torch.zeros(4, heads, 16, 64), impl=SimpleNamespace(**impl))

    refuse_unsupported_layers(1, {}, [layer(2, sliding_window=-1), layer(2, alibi_slopes=None)])
    for num_groups, shared, layers, reason in (
        (2, {}, [layer(2)], "2 KV cache groups"),
        (1, {"a": "b"}, [layer(2)], "cross-layer KV sharing"),
        (1, {}, [layer(2), layer(4)], "different shapes"),
        (1, {}, [layer(2), layer(2, sliding_window=128)], "sliding-window layers"),
    ):
        with pytest.raises(RandKVUnsupportedError, match=reason):
            refuse_unsupported_layers(num_groups, shared, layers)
