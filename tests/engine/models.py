# SPDX-License-Identifier: Apache-2.0
"""Models that the engine tests run: the embedded default one, and a small random one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
TINY_VOCABULARY = 512


def make_tiny_model(directory: Path, vocab_size: int = TINY_VOCABULARY) -> Path:
    """Random weights: 2 layers, 4 query heads on 2 KV heads of size 32, 16,384 positions.

    Weights are wide enough that what a token attends to decides what comes next: a wrong
    keep-set changes the output.
    """
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


def make_qwen3_model(directory: Path) -> Path:
    """Random weights: 3 layers, 8 query heads on 4 KV heads of size 32."""
    torch.manual_seed(21)
    config = Qwen3Config(**_QWEN3, num_attention_heads=8, num_key_value_heads=4)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


def make_qwen3_moe_model(directory: Path) -> Path:
    """Random weights: 3 layers of 4 experts, 4 query heads on 1 KV head of size 32."""
    torch.manual_seed(22)
    config = Qwen3MoeConfig(
        **_QWEN3,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


_QWEN3 = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def make_small_chat_model(directory: Path) -> Path:
    """The tiny model with the vocabulary, tokenizer and chat template of SmolLM2."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (SMOLLM2 / file).is_file():
            shutil.copy(SMOLLM2 / file, directory / file)
    return make_tiny_model(directory, vocab_size=49152)
