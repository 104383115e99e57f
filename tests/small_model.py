"""A model of random weights with SmolLM2's tokenizer, chat template, vocabulary and context: the same requests at a
small part of the work, for tests that do not ask what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from slipring.runtime.model import open_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""config.json but for the vocabulary and the context."""


def save_random(
    path: Path, vocab_size: int, max_position_embeddings: int, num_idle: int = 0, loudness: float = 1.0
) -> None:
    """Write config.json and weights of standard deviation 0.3, always the same ones; makes the directory. `num_idle`
    layers more add nothing; what the others add to the residual stream is multiplied with `loudness`."""
    chance = np.random.default_rng(1)
    hidden, inner, kv = LLAMA["hidden_size"], LLAMA["intermediate_size"], 2 * 16

    def normal(*shape: int) -> np.ndarray:
        return (chance.standard_normal(shape) * 0.3).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(vocab_size, hidden), "lm_head.weight": normal(vocab_size, hidden)}
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    num_layers = LLAMA["num_hidden_layers"] + num_idle
    for layer in range(num_layers):
        shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden)}
        shapes |= {"self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden)}
        shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, shape in shapes.items():
            weight = normal(*shape)
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                weight *= loudness if layer < LLAMA["num_hidden_layers"] else 0.0
            weights[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = LLAMA | {"vocab_size": vocab_size, "max_position_embeddings": max_position_embeddings}
    config["num_hidden_layers"] = num_layers
    (path / "config.json").write_text(json.dumps(config))


def save_small_model(path: Path) -> str:
    """Returns the path, for `slipring serve`."""
    model = open_model("smollm2")
    tokenizer, template = model.tokenizer(), model.chat_template()
    assert template is not None
    save_random(path, tokenizer.vocab_size, model.spec.max_position_embeddings)
    (path / "tokenizer.json").write_bytes(tokenizer.document)
    texts = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    (path / "tokenizer_config.json").write_text(json.dumps(texts))
    (path / "chat_template.jinja").write_text(template.source)
    return str(path)
