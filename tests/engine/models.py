# SPDX-License-Identifier: Apache-2.0
"""Models that the engine tests run: the embedded default one, and a small random one."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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


def make_small_chat_model(directory: Path) -> Path:
    """The tiny model with the vocabulary, tokenizer and chat template of SmolLM2."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (SMOLLM2 / file).is_file():
            shutil.copy(SMOLLM2 / file, directory / file)
    return make_tiny_model(directory, vocab_size=49152)
