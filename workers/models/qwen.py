"""Qwen2 and Qwen3 (Hugging Face `Qwen2ForCausalLM`, `Qwen3ForCausalLM`).

Qwen2 is Llama with a bias on q, k and v, which the spec says and the Llama file already honours. Qwen3 drops the
bias and norms each head of q and k before RoPE; its head_dim need not be hidden_size / num_heads. Neither family's
GGUF files permute the rows of q and k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.rmsnorm import rmsnorm
from slipring.shm.spec import ModelSpec
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Attention, Llama


class Qwen3Attention(Attention):
    """Adds the norm of each head; q's and k's weights are stacked so that one call norms both."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str) -> None:
        super().__init__(spec, weights, prefix)
        self.eps = spec.rms_norm_eps
        q_norm = weights.get(f"{prefix}.q_norm.weight", (spec.head_dim,))
        k_norm = weights.get(f"{prefix}.k_norm.weight", (spec.head_dim,))
        self.head_norm = torch.cat((q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1)))

    def prepare_heads(self, heads: Tensor) -> Tensor:
        normed, _ = rmsnorm(heads, self.head_norm, self.eps)
        return normed


class Qwen2(Llama):
    """Llama's layers with a bias on q, k and v."""


class Qwen3(Llama):
    """Llama's layers with normed heads."""

    attention = Qwen3Attention
