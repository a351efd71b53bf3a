# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from randkv import RandKVConfigError, RandKVError
from randkv.advice.memory import GIB, KVMemory, Weights, find_weights, kv_memory_of
from randkv.advice.model_shape import load_model, model_shape
from tests.unit.advice.cases import QWEN3_4B, model


def weights(folder: Path, given: float | None = None, dtype: str = "auto") -> Weights:
    files = load_model(str(folder))
    return find_weights(files, model_shape(files, dtype), given)


def test_memory_is_the_share_less_weights_and_allowance() -> None:
    found = kv_memory_of(80.0, 0.9, Weights(16 * GIB, "given"), 2, 4.0)
    assert found.num_bytes == pytest.approx((80 * 0.9 - 8 - 4) * GIB)
    assert found.weights_bytes == 8 * GIB


def test_one_block_is_the_null_block() -> None:
    assert KVMemory(10 * 64 + 63).num_blocks(64) == 9


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("gpu_memory", {"gpu_gib": 0}),
        ("gpu_memory", {"gpu_gib": float("nan")}),
        ("gpu_memory", {"gpu_gib": float("inf")}),
        ("gpu_memory_utilization", {"utilization": 1.01}),
        ("gpu_memory_utilization", {"utilization": 0.0}),
        ("allowance_gib", {"allowance_gib": -1.0}),
        ("gpu_memory", {"gpu_gib": 20.0}),
    ],
)
def test_memory_that_is_none_is_refused(field: str, changes: dict[str, Any]) -> None:
    good = {"gpu_gib": 80.0, "utilization": 0.9, "num_ranks": 1, "allowance_gib": 2.0}
    with pytest.raises(RandKVConfigError, match=f"{field} has value"):
        kv_memory_of(weights=Weights(16 * GIB, "given"), **{**good, **changes})


def test_weights_of_qwen3_4b_are_estimated(tmp_path: Path) -> None:
    """4.02 billion parameters, as the model's card says."""
    found = weights(model(tmp_path))
    assert found.num_bytes == pytest.approx(4.02e9 * 2, rel=0.005)
    assert found.how == "estimated from the config"
    untied = weights(model(tmp_path, tie_word_embeddings=False))
    assert untied.num_bytes - found.num_bytes == 151936 * 2560 * 2


def test_files_go_before_the_estimate_and_given_weights_before_both(tmp_path: Path) -> None:
    folder = model(tmp_path)
    (folder / "model-1.safetensors").write_bytes(bytes(600))
    (folder / "model-2.safetensors").write_bytes(bytes(400))
    assert weights(folder).num_bytes == 1000
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 970}}))
    assert weights(folder) == Weights(970, "safetensors files")
    index.write_text("{")
    assert weights(folder).num_bytes == 1000
    assert weights(folder, 2.0) == Weights(2 * GIB, "given")


def test_files_are_scaled_to_the_dtype_that_is_served(tmp_path: Path) -> None:
    folder = model(tmp_path, torch_dtype="float32")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    assert weights(folder).num_bytes == 500
    assert weights(folder, dtype="float32").num_bytes == 1000
    quantised = model(tmp_path, torch_dtype="float32", quantization_config={"quant_method": "awq"})
    assert weights(quantised).num_bytes == 1000


@pytest.mark.parametrize(
    "changes", [{"model_type": "qwen3_moe"}, {"quantization_config": {"quant_method": "awq"}}]
)
def test_weights_that_nothing_tells_have_to_be_given(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(RandKVError, match="Give --weights-gib"):
        weights(model(tmp_path, **changes))


def test_weights_of_a_multimodal_model_are_not_estimated_from_its_text(tmp_path: Path) -> None:
    folder = model(tmp_path, text_config=QWEN3_4B)
    with pytest.raises(RandKVError, match=r"qwen3 text part of a multimodal .* --weights-gib"):
        weights(folder)
    assert weights(folder, 2.0).num_bytes == 2 * GIB


def test_quantised_files_of_a_multimodal_model_are_not_scaled(tmp_path: Path) -> None:
    text = {**QWEN3_4B, "torch_dtype": "float32"}
    folder = model(tmp_path, quantization_config={"quant_method": "awq"}, text_config=text)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    assert weights(folder) == Weights(1000, "safetensors files")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_given_weights_are_a_size(tmp_path: Path, value: float) -> None:
    with pytest.raises(RandKVConfigError, match="weights_gib has value"):
        weights(model(tmp_path), value)


def test_a_total_size_that_is_none_is_named(tmp_path: Path) -> None:
    folder = model(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": -5}}))
    with pytest.raises(RandKVConfigError, match="total_size has value -5"):
        weights(folder)
