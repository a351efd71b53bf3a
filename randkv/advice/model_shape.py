# SPDX-License-Identifier: Apache-2.0
"""What a model's ``config.json`` says about its KV cache, and what the policy refuses in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from randkv.config import check_integer
from randkv.errors import RandKVConfigError, RandKVUnsupportedError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_DTYPE_BYTES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_DTYPES = tuple(name for name in KV_DTYPE_BYTES if name != "float32")
"""What vLLM 0.28.0 lets one ask for; a float32 cache is that of a model served in float32."""
MAX_LAYERS = 4096
MAX_WIDTH = 2**24
_FULL = "serve a model with full attention in every layer"
_SAME = "serve a model with full attention, rotary positions and the same KV cache in every layer"
_UNUSED_BY_DEFAULT = ("qwen2", "qwen3", "smollm3")
"""Model types whose `sliding_window` counts only where `use_sliding_window` is true."""


def _has_window(config: Mapping[str, Any]) -> bool:
    default = not str(config.get("model_type", "")).startswith(_UNUSED_BY_DEFAULT)
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", default))


def _layer_types(config: Mapping[str, Any]) -> set[str]:
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    return {str(kind) for kind in types} if isinstance(types, list) else set()


def _is_hybrid(config: Mapping[str, Any]) -> bool:
    known = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
    marks = ("hybrid_override_pattern", "attn_type_list", "full_attention_interval")
    has_mamba = any(key.startswith(("mamba_", "ssm_")) for key in config)
    return has_mamba or bool(_layer_types(config) - known) or any(config.get(m) for m in marks)


REFUSALS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        "encoder-decoder models",
        lambda c: bool(c.get("is_encoder_decoder")),
        "serve a decoder-only model",
    ),
    ("hybrid (Mamba) models", _is_hybrid, _FULL),
    (
        "multi-head latent attention (MLA)",
        lambda c: bool(c.get("kv_lora_rank")),
        "serve a model with multi-head or grouped-query attention",
    ),
    (
        "sliding-window attention",
        lambda c: _has_window(c) or "sliding_attention" in _layer_types(c),
        _FULL,
    ),
    (
        "chunked local attention",
        lambda c: bool(c.get("attention_chunk_size")) or "chunked_attention" in _layer_types(c),
        _FULL,
    ),
    ("cross-layer KV sharing", lambda c: bool(c.get("num_kv_shared_layers")), _SAME),
    (
        "ALiBi, which reads positions off slots",
        lambda c: bool(c.get("alibi")) or c.get("position_embedding_type") == "alibi",
        _SAME,
    ),
)
"""Feature, test, remedy: what of `randkv.vllm.support` a config tells, in the same words."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's text config, and the folder it came from (None: only the config is here).

    `has_other_parts` says that it is one part of a multimodal model's, whose rest is left out.
    """

    name: str
    config: Mapping[str, Any]
    folder: Path | None
    has_other_parts: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the KV cache depends on.

    Attributes:
        num_kv_heads: KV heads per layer of the whole model.
        dtype: What vLLM computes in.
        kv_dtype: What a KV cache element is; a key of `KV_DTYPE_BYTES`.
        max_position_embeddings: Positions the model was made for; None where the config says none.
    """

    name: str
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_dtype: str
    max_position_embeddings: int | None

    def kv_bytes_per_token(self, num_ranks: int = 1) -> int:
        """K and V of one token in all layers, on one of `num_ranks` tensor-parallel ranks.

        With fewer KV heads than ranks every rank holds one whole head.

        Raises:
            RandKVConfigError: Heads and ranks do not divide each other.
        """
        check_integer("tensor_parallel_size", num_ranks, 1, 1024)
        heads, shared = sorted((self.num_kv_heads, num_ranks), reverse=True)
        if heads % shared or self.num_attention_heads % num_ranks:
            raise RandKVConfigError(
                "tensor_parallel_size",
                num_ranks,
                f"a divisor of the model's {self.num_attention_heads} attention heads that "
                f"divides its {self.num_kv_heads} KV heads or is a multiple of them",
            )
        on_rank = max(1, self.num_kv_heads // num_ranks)
        return 2 * self.num_layers * on_rank * self.head_size * KV_DTYPE_BYTES[self.kv_dtype]


def _from_hub(name: str) -> Path:
    remedy = "Give a directory with a config.json, or the path of a config.json"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise RandKVConfigError(
            "model",
            name,
            "a directory with a config.json, since huggingface_hub is not installed",
            f"{remedy}; Hub names need: pip install huggingface_hub.",
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries, line by line
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # many kinds: no network, no such model, gated, a bad name
        raise RandKVConfigError(
            "model",
            name,
            "a directory with a config.json, or a Hub model whose config is in the local cache or "
            f"can be fetched ({type(error).__name__})",
            f"{remedy}.",
        ) from None


def load_model(name: str) -> ModelFiles:
    """The config behind a directory, the path of a ``config.json``, or a Hub name.

    Raises:
        RandKVConfigError: There is none, or it is not a JSON object.
    """
    path = Path(name)
    folder: Path | None = None
    if path.is_dir():
        folder, path = path, path / "config.json"
    elif path.is_file():
        folder = path.parent
    elif path.suffix != ".json" and not name.startswith((".", "/")):
        path = _from_hub(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RandKVConfigError(
            "model", name, f"a readable config.json ({reason})", "Give the model's directory."
        ) from None
    except (ValueError, RecursionError):
        raise RandKVConfigError("model", name, f"JSON in {path}") from None
    if not isinstance(config, dict):
        raise RandKVConfigError("model", name, f"a JSON object in {path}")
    text = config.get("text_config")
    has_other_parts = False
    if isinstance(text, dict) and "num_hidden_layers" in text:
        has_other_parts = True
        whole = {
            "dtype": config.get("dtype", config.get("torch_dtype")),
            "quantization_config": config.get("quantization_config"),
        }
        config = {**text, **{key: whole[key] for key in whole if text.get(key) is None}}
    return ModelFiles(name, config, folder, has_other_parts)


def size_of(files: ModelFiles, key: str, default: int | None = None, high: int = MAX_WIDTH) -> int:
    """The size behind `key` of the config; RandKVConfigError when it is none."""
    value = files.config.get(key)
    value = default if value is None else value
    return check_integer(f"{files.name}: {key}", value, 1, high)


def _dtype(files: ModelFiles, asked: str) -> str:
    if asked != "auto":
        return asked
    found = checkpoint_dtype(files)
    if found is None:
        raise RandKVConfigError(
            f"{files.name}: dtype", found, f"one of {', '.join(DTYPE_BYTES)}", "Give --dtype."
        )
    return "bfloat16" if found == "float32" else found


def checkpoint_dtype(files: ModelFiles) -> str | None:
    """What the config says its weights are; None where it says nothing known."""
    found = files.config.get("dtype") or files.config.get("torch_dtype")
    return found if isinstance(found, str) and found in DTYPE_BYTES else None


def model_shape(files: ModelFiles, dtype: str = "auto", kv_dtype: str = "auto") -> ModelShape:
    """The shape that `files` describes.

    Args:
        dtype: ``auto`` is the config's, and bfloat16 for float32 weights, as in vLLM on a GPU.
        kv_dtype: ``auto`` is `dtype`.

    Raises:
        RandKVUnsupportedError: The policy cannot run with this model; lists every reason.
        RandKVConfigError: A field is missing or no size.
    """
    reasons = [f"{feature}: {remedy}" for feature, test, remedy in REFUSALS if test(files.config)]
    if reasons:
        raise RandKVUnsupportedError(reasons)
    for field, value, known in (
        ("dtype", dtype, DTYPE_BYTES),
        ("kv_dtype", kv_dtype, KV_DTYPES),
    ):
        if value != "auto" and value not in known:
            raise RandKVConfigError(field, value, f"one of auto, {', '.join(known)}")
    heads = size_of(files, "num_attention_heads")
    kv_heads = size_of(files, "num_key_value_heads", heads)
    head_size = files.config.get("head_dim") or size_of(files, "hidden_size") // heads
    computed = _dtype(files, dtype)
    has_limit = files.config.get("max_position_embeddings") is not None
    return ModelShape(
        files.name,
        size_of(files, "num_hidden_layers", high=MAX_LAYERS),
        heads,
        kv_heads,
        check_integer(f"{files.name}: head_dim", head_size, 1, MAX_WIDTH),
        computed,
        computed if kv_dtype == "auto" else kv_dtype,
        size_of(files, "max_position_embeddings", high=2**31 - 1) if has_limit else None,
    )
