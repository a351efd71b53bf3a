# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from randkv import RandKVConfigError
from randkv.advice.model_shape import REFUSALS, load_model, model_shape
from randkv.errors import RandKVUnsupportedError
from randkv.vllm.support import REFUSALS as AT_START
from tests.unit.advice.cases import QWEN3_4B, QWEN3_4B_TOKEN, model


def token_bytes(folder: Path, num_ranks: int = 1, **options: str) -> int:
    return model_shape(load_model(str(folder)), **options).kv_bytes_per_token(num_ranks)


def test_kv_bytes_of_qwen3_4b(tmp_path: Path) -> None:
    folder = model(tmp_path)
    assert token_bytes(folder) == QWEN3_4B_TOKEN
    assert token_bytes(folder, kv_dtype="fp8") == QWEN3_4B_TOKEN // 2
    assert token_bytes(folder, dtype="float32") == 2 * QWEN3_4B_TOKEN
    assert token_bytes(folder / "config.json") == QWEN3_4B_TOKEN


@pytest.mark.parametrize(("num_ranks", "heads_on_rank"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_kv_heads_are_split_over_ranks_and_replicated_beyond(
    tmp_path: Path, num_ranks: int, heads_on_rank: int
) -> None:
    assert token_bytes(model(tmp_path), num_ranks) == QWEN3_4B_TOKEN // 8 * heads_on_rank


@pytest.mark.parametrize("num_ranks", [0, 3, 12, 64])
def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path, num_ranks: int) -> None:
    with pytest.raises(RandKVConfigError, match="tensor_parallel_size has value"):
        token_bytes(model(tmp_path), num_ranks)


def test_kv_heads_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RandKVConfigError, match="divides its 6 KV heads or is a multiple"):
        token_bytes(model(tmp_path, num_attention_heads=48, num_key_value_heads=6), 4)


def test_missing_fields_have_the_defaults_of_llama(tmp_path: Path) -> None:
    folder = model(tmp_path, num_key_value_heads=..., head_dim=...)
    assert token_bytes(folder) == 2 * 36 * 32 * (2560 // 32) * 2


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_float32_weights_are_served_as_bfloat16(tmp_path: Path, key: str) -> None:
    folder = model(tmp_path, **{"torch_dtype": ..., key: "float32"})
    assert token_bytes(folder) == QWEN3_4B_TOKEN


def test_the_text_config_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    text = {k: v for k, v in QWEN3_4B.items() if k != "torch_dtype"}
    folder = model(tmp_path, **dict.fromkeys(QWEN3_4B, ...), dtype="bfloat16", text_config=text)
    assert token_bytes(folder) == QWEN3_4B_TOKEN
    files = load_model(str(folder))
    assert files.has_other_parts
    assert not files.config["quantization_config"]
    assert not load_model(str(model(tmp_path))).has_other_parts


@pytest.mark.parametrize(
    "own", [{}, {"quantization_config": None}, {"quantization_config": {"b": 2}}]
)
def test_the_text_config_is_quantised_like_the_whole(tmp_path: Path, own: dict[str, Any]) -> None:
    folder = model(tmp_path, quantization_config={"a": 1}, text_config={**QWEN3_4B, **own})
    found = load_model(str(folder)).config["quantization_config"]
    assert found == (own.get("quantization_config") or {"a": 1})


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("multi-head latent attention (MLA)", {"kv_lora_rank": 512}),
        ("sliding-window attention", {"model_type": "mistral", "sliding_window": 4096,
                                      "use_sliding_window": ...}),
        ("sliding-window attention", {"sliding_window": 4096, "use_sliding_window": True}),
        ("sliding-window attention", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("hybrid (Mamba) models", {"layer_types": ["full_attention", "linear_attention"]}),
        ("hybrid (Mamba) models", {"mamba_d_state": 16}),
        ("hybrid (Mamba) models", {"full_attention_interval": 4}),
        ("chunked local attention", {"attention_chunk_size": 8192}),
        ("encoder-decoder models", {"is_encoder_decoder": True}),
        ("cross-layer KV sharing", {"num_kv_shared_layers": 10}),
        ("ALiBi, which reads positions off slots", {"alibi": True}),
    ],
)  # fmt: skip
def test_what_the_policy_refuses_is_refused(
    tmp_path: Path, feature: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(RandKVUnsupportedError) as refused:
        token_bytes(model(tmp_path, **changes))
    (reason,) = refused.value.reasons
    assert reason.startswith(f"{feature}: serve ")


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": ...},
        {"model_type": "mistral", "sliding_window": 0, "use_sliding_window": ...},
        {"layer_types": ["full_attention"] * 36},
    ],
)
def test_a_window_that_is_switched_off_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert token_bytes(model(tmp_path, **changes)) == QWEN3_4B_TOKEN


def test_words_are_those_of_the_engines_refusal() -> None:
    at_start = {r.feature: r.remedy for r in AT_START}
    shared = {feature: remedy for feature, _, remedy in REFUSALS if feature in at_start}
    assert len(shared) == 5
    assert shared == {feature: at_start[feature] for feature in shared}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", ...),
        ("num_hidden_layers", "36"),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -8),
        ("head_dim", 1.5),
        ("max_position_embeddings", []),
        ("torch_dtype", "int8"),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(RandKVConfigError, match=f"{key.removeprefix('torch_')} has value"):
        token_bytes(model(tmp_path, **{key: value}))


@pytest.mark.parametrize("option", ["dtype", "kv_dtype"])
def test_an_unknown_dtype_is_named(tmp_path: Path, option: str) -> None:
    with pytest.raises(RandKVConfigError, match=f"{option} has value 'nvfp4': expected one of"):
        token_bytes(model(tmp_path), **{option: "nvfp4"})


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000, "\ufeff"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(RandKVConfigError, match="model has value"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "nowhere/config.json", "a b c", ""])
def test_a_model_that_is_not_there_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RandKVConfigError, match="model has value"):
        load_model(name)


def test_a_hub_name_needs_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RandKVConfigError, match="pip install huggingface_hub"):
        load_model("Qwen/Qwen3-4B")
