"""Tiny random checkpoints written by transformers, and their `ModelSpec`s."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from slipring.runtime.model import resolve_model
from slipring.shm.spec import ModelSpec

_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-llama3-rope": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "llama-yarn-rope": LlamaConfig(**_SIZES, rope_parameters=_YARN),
    "llama-linear-rope": LlamaConfig(**_SIZES, rope_parameters=_LINEAR),
    "llama-biases": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=False),
}


def save_tiny(family: str, path: Path, vocab_size: int = 260, **save: Any) -> tuple[ModelSpec, Any]:
    """Write a random checkpoint of the family; returns our spec of it and transformers' model."""
    torch.manual_seed(1)
    config = copy.deepcopy(FAMILIES[family])
    config.vocab_size = vocab_size
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path, **save)
    return resolve_model(str(path)), model
