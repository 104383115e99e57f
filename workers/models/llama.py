"""Llama (Hugging Face `LlamaForCausalLM`; also SmolLM2, Mistral without sliding window, and their GGUF files).

Pre-norm decoder with grouped-query attention, neox RoPE and a gated SiLU MLP; biases and tied embeddings as the
spec says. The other families are written as differences from this file.

Weights are fused at load (`PACKED`) and packed for `kernels/linear.py`; the embedding table stays row-major beside
the packed head, also when the two are tied. Only rows that are sampled reach the final norm and the head.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.linear import linear
from slipring.kernels.rmsnorm import rmsnorm
from slipring.kernels.rope import build_cos_sin, inverse_frequencies
from slipring.kernels.silu_mul import silu_mul
from slipring.shm.spec import ModelSpec
from slipring.workers.attention import Pools
from slipring.workers.batch import Batch
from slipring.workers.kv_cache import KvCache
from slipring.workers.loader import Weights

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused weight -> the checkpoint's tensors, stacked by rows in this order."""


class Linear:
    """A packed or quantised, possibly fused, linear layer. `parts` are tensor names without `.weight`."""

    def __init__(self, weights: Weights, parts: tuple[str, ...], out_features: int, in_features: int, bias: bool):
        names = [f"{part}.weight" for part in parts]
        shape = (out_features, in_features)
        self.quantized = weights.quantized(names, shape)
        self.weight = None if self.quantized else weights.packed(names, shape)
        self.bias = weights.fused([f"{part}.bias" for part in parts], (out_features,)) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out], plus `residual` [T, out] when given."""
        if self.weight is None:
            assert self.quantized is not None
            return self.quantized.forward(x, self.bias, residual)
        return linear(x, self.weight, self.bias, residual)


class Attention:
    """Grouped-query attention over the paged pool."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale = spec.head_dim**-0.5
        all_heads = spec.num_heads + 2 * spec.num_kv_heads
        parts = tuple(f"{prefix}.{part}" for part in PACKED["qkv_proj"])
        self.qkv_proj = Linear(weights, parts, all_heads * self.head_dim, spec.hidden_size, spec.attention_bias)
        self.o_proj = Linear(
            weights,
            (f"{prefix}.o_proj",),
            spec.hidden_size,
            spec.num_heads * spec.head_dim,
            spec.attention_output_bias,
        )

    def prepare_heads(self, heads: Tensor) -> Tensor:
        """Heads of q and k [T, H + KVH, D] before RoPE; a family may norm them here."""
        return heads

    def forward(self, x: Tensor, residual: Tensor, cos_sin: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """x [T, hidden] -> residual + attention(x), [T, hidden]. Stores this step's keys and values."""
        heads = self.qkv_proj.forward(x).view(x.shape[0], -1, self.head_dim)
        turning, value = self.prepare_heads(heads[:, : -self.num_kv_heads]), heads[:, -self.num_kv_heads :]
        out = batch.attention.layer(turning, value, cos_sin, pools, self.scale)
        return self.o_proj.forward(out, residual)


class MLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str) -> None:
        parts = tuple(f"{prefix}.{part}" for part in PACKED["gate_up_proj"])
        self.gate_up_proj = Linear(weights, parts, 2 * spec.intermediate_size, spec.hidden_size, spec.mlp_bias)
        self.down_proj = Linear(
            weights, (f"{prefix}.down_proj",), spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down_proj.forward(silu_mul(self.gate_up_proj.forward(x)), residual)


class Layer:
    """One decoder layer."""

    def __init__(self, attention: type[Attention], spec: ModelSpec, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden = (spec.hidden_size,)
        self.eps = spec.rms_norm_eps
        self.input_norm = weights.get(f"{prefix}.input_layernorm.weight", hidden)
        self.attention = attention(spec, weights, f"{prefix}.self_attn")
        self.post_attention_norm = weights.get(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp = MLP(spec, weights, f"{prefix}.mlp")

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """Residual stream [T, hidden] -> residual stream."""
        normed, _ = rmsnorm(x, self.input_norm, self.eps)
        x = self.attention.forward(normed, x, cos_sin, batch, pools)
        normed, _ = rmsnorm(x, self.post_attention_norm, self.eps)
        return self.mlp.forward(normed, x)


class Llama:
    """The whole model. `forward` returns logits of the sampled tokens only; `hidden` and `logits` are its halves."""

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, spec: ModelSpec, weights: Weights, max_model_len: int) -> None:
        self.eps = spec.rms_norm_eps
        self.cos_sin = _rope_table(spec, weights, max_model_len)
        table = (spec.vocab_size, spec.hidden_size)
        self.embedding = weights.get("model.embed_tokens.weight", table)
        self.layers = [Layer(self.attention, spec, weights, index) for index in range(spec.num_layers)]
        self.norm = weights.get("model.norm.weight", (spec.hidden_size,))
        tied = spec.tie_word_embeddings
        name, made = ("model.embed_tokens.weight", self.embedding) if tied else ("lm_head.weight", None)
        self.head = weights.packed((name,), table, made)
        self.taps: tuple[int, ...] = ()
        """Rising depths, in layers, whose residual streams the next `hidden` keeps for a draft head: `tapped`."""
        self.tapped: list[Tensor] = []

    def forward(self, batch: Batch, kv: KvCache) -> Tensor:
        """Logits [S, vocab] in the compute dtype."""
        return self.logits(self.hidden(batch, kv), batch.sample_at)

    def hidden(self, batch: Batch, kv: KvCache) -> Tensor:
        """The residual stream behind the last layer, [T, hidden]."""
        x = F.embedding(batch.input_ids, self.embedding)
        self.tapped = []
        for depth, (layer, pools) in enumerate(zip(self.layers, kv.pools, strict=True), 1):
            x = layer.forward(x, self.cos_sin, batch, pools)
            if depth in self.taps:
                self.tapped.append(x)
        return x

    def normed(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The final norm of rows `at` [S] int64 of `hidden`: [S, hidden]."""
        return rmsnorm(hidden.index_select(0, at), self.norm, self.eps)[0]

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the output matrix, [len(token_ids), hidden]."""
        dense = self.head.to_dense() if self.head.is_mkldnn else self.head
        return dense[token_ids]

    def logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        """[S, vocab] of rows `at` [S] int64 of `hidden`."""
        if not len(at):
            return hidden.new_empty((0, self.embedding.shape[0]))
        return linear(self.normed(hidden, at), self.head)


def _rope_table(spec: ModelSpec, weights: Weights, max_model_len: int) -> Tensor:
    """[max_model_len, 2, head_dim]. A GGUF file may carry Llama 3's frequency factors as a tensor."""
    inv_freq, factor = inverse_frequencies(
        spec.head_dim, spec.rope_theta, spec.rope_scaling, spec.max_position_embeddings, max_model_len
    )
    if "rope_freqs.weight" in weights:
        inv_freq = inv_freq / weights.get("rope_freqs.weight", (spec.head_dim // 2,)).float().cpu()
    return build_cos_sin(inv_freq, factor, max_model_len, weights.dtype).to(weights.device)
