# SPDX-License-Identifier: Apache-2.0
"""How much memory of one GPU is left for the KV cache. Everything is per tensor-parallel rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from randkv.advice.model_shape import (
    DTYPE_BYTES,
    ModelFiles,
    ModelShape,
    checkpoint_dtype,
    model_shape,
    size_of,
)
from randkv.config import check_number
from randkv.errors import RandKVConfigError, RandKVError

GIB = 2**30
MAX_GIB = 2**20
DEFAULT_UTILIZATION = 0.92
"""Source: ``CacheConfig.gpu_memory_utilization`` of vLLM 0.28.0."""
DEFAULT_ALLOWANCE_GIB = 2.0
"""For activations, logits, CUDA graphs and what libraries hold: assumed, not measured."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All ranks' weights; `how` says where the number comes from."""

    num_bytes: float
    how: str


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Memory for the KV cache on each GPU.

    Attributes:
        num_bytes: Bytes per GPU.
        gpu_bytes, weights_bytes, allowance_bytes: What it is left over from; None when given.
    """

    num_bytes: float
    gpu_bytes: float | None = None
    utilization: float | None = None
    weights_bytes: float | None = None
    allowance_bytes: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def num_blocks(self, block_bytes: int) -> int:
        """Blocks for requests; one more is vLLM's null block."""
        return int(self.num_bytes // block_bytes) - 1


_ESTIMATED = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Model types with the weights that `estimated_parameters` counts."""


def estimated_parameters(files: ModelFiles) -> int:
    """Embeddings, attention and gated MLP of a dense Llama-like model, no norms and biases.

    Raises:
        RandKVError: Another kind of model, whose weights the config does not tell.
    """
    config = files.config
    is_quantised = bool(config.get("quantization_config"))
    if config.get("model_type") not in _ESTIMATED or is_quantised or files.has_other_parts:
        kind = "quantised" if is_quantised else str(config.get("model_type"))
        if files.has_other_parts:
            kind = f"{kind} text part of a multimodal model"
        raise RandKVError(
            f"The weights of {files.name} are not in its directory and cannot be estimated from "
            f"its config ({kind}). Give --weights-gib, or --kv-memory without --memory-bandwidth."
        )
    shape = model_shape(files, "bfloat16")
    hidden = size_of(files, "hidden_size")
    attention = 2 * hidden * shape.head_size * (shape.num_attention_heads + shape.num_kv_heads)
    mlp = 3 * hidden * size_of(files, "intermediate_size")
    embeddings = (
        hidden * size_of(files, "vocab_size") * (1 if config.get("tie_word_embeddings") else 2)
    )
    return shape.num_layers * (attention + mlp) + embeddings


def _stored_bytes(folder: Path) -> int:
    """Bytes of the safetensors files in `folder`, 0 where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
            return int(check_number(f"{index}: total_size", total, high=2.0**60))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, RandKVConfigError):
                raise
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def find_weights(files: ModelFiles, shape: ModelShape, given_gib: float | None) -> Weights:
    """`given_gib`, else what the directory holds, else an estimate from the config.

    Raises:
        RandKVError: Nothing of the three is there.
    """
    if given_gib is not None:
        return Weights(check_number("weights_gib", given_gib, high=MAX_GIB) * GIB, "given")
    size = DTYPE_BYTES[shape.dtype]
    stored = _stored_bytes(files.folder) if files.folder else 0
    if stored:
        stored_dtype = checkpoint_dtype(files)
        if files.config.get("quantization_config") or stored_dtype in (None, shape.dtype):
            return Weights(stored, "safetensors files")
        scale = size / DTYPE_BYTES[stored_dtype]
        return Weights(stored * scale, f"safetensors files, {stored_dtype} as {shape.dtype}")
    return Weights(estimated_parameters(files) * size, "estimated from the config")


def given_kv_memory(kv_gib: float) -> KVMemory:
    """`kv_gib` GiB on each GPU."""
    return KVMemory(check_number("kv_memory", kv_gib, high=MAX_GIB) * GIB)


def kv_memory_of(
    gpu_gib: float, utilization: float, weights: Weights, num_ranks: int, allowance_gib: float
) -> KVMemory:
    """What vLLM finds at start: its share of the GPU, less weights and everything else.

    Raises:
        RandKVConfigError: A value is out of range, or nothing is left.
    """
    check_number("gpu_memory", gpu_gib, high=MAX_GIB)
    check_number("gpu_memory_utilization", utilization, high=1.0)
    check_number("allowance_gib", allowance_gib, low=0.0, high=MAX_GIB)
    per_gpu = weights.num_bytes / num_ranks
    left = gpu_gib * GIB * utilization - per_gpu - allowance_gib * GIB
    if left <= 0:
        needed = (per_gpu / GIB + allowance_gib) / utilization
        raise RandKVConfigError(
            "gpu_memory",
            gpu_gib,
            f"more than {needed:.1f} GiB: {per_gpu / GIB:.1f} for weights ({weights.how}) and "
            f"{allowance_gib:.1f} besides, in {utilization:.0%} of the GPU",
            "Use a larger GPU or more of them (--tensor-parallel-size), or set --weights-gib or "
            "--allowance-gib where these are wrong.",
        )
    return KVMemory(left, gpu_gib * GIB, utilization, per_gpu, allowance_gib * GIB)
