"""A decode step of a Llama out of the engine's kernels, with random weights: what a captured graph replays.

This is no model of the engine's (`workers/models` is); it is the same sequence of kernels, so that a step can be timed,
captured and compared where only kernels are proven. `kernels` chooses the Triton side or the references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perf.gpu_case import Maker
from slipring.kernels import paged_decode, rmsnorm, rope_store_kv, row_state, silu_mul
from slipring.kernels.paged_kv import AttentionOptions
from slipring.kernels.rope import build_cos_sin, inverse_frequencies
from slipring.kernels.row_state import DecodeInputs
from slipring.kernels.sampling import GREEDY_BELOW, DrawParams, draw_ref
from slipring.kernels.sampling_triton import draw_triton

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    """Positions that are in the pool already."""
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16


TINY = Shape(96, 160, 2, 4, 2, 64, 130, 37, torch.float32)
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 64, 128256, 2048)
"""Llama 3.2 1B's sizes."""


class DecodeStep:
    """State, weights and pools of `batch` rows; `step()` draws one token for each."""

    def __init__(self, make: Maker, shape: Shape, batch: int, kernels: str, num_splits: int) -> None:
        self.shape, self.batch, self.num_splits = shape, batch, num_splits
        self._side = {
            name: getattr(module, f"{name}_{kernels}")
            for module, name in (
                (rmsnorm, "rmsnorm"), (rope_store_kv, "rope_store_kv"), (paged_decode, "paged_decode"),
                (silu_mul, "silu_mul"), (row_state, "decode_inputs"), (row_state, "commit_tokens"),
            )
        }  # fmt: skip
        self._draw = self._draw_triton if kernels == "triton" else lambda logits: draw_ref(logits, self.params)
        self.weights = self._make_weights(make)
        self._make_state(make)
        self.logits = torch.empty(0)

    def _make_weights(self, make: Maker) -> dict[str, Tensor]:
        s = self.shape

        def matrix(rows: int, columns: int) -> Tensor:
            return make.normal(rows, columns, dtype=s.dtype, scale=columns**-0.5)

        found = {"embedding": make.normal(s.vocab, s.hidden, dtype=s.dtype), "head": matrix(s.vocab, s.hidden)}
        heads = s.heads + 2 * s.kv_heads
        for i in range(s.layers):
            found[f"{i}.qkv"] = matrix(heads * s.head_dim, s.hidden)
            found[f"{i}.o"] = matrix(s.hidden, s.heads * s.head_dim)
            found[f"{i}.gate_up"] = matrix(2 * s.intermediate, s.hidden)
            found[f"{i}.down"] = matrix(s.hidden, s.intermediate)
        return found | {"norm": make.put(torch.ones(s.hidden, dtype=s.dtype))}

    def _make_state(self, make: Maker) -> None:
        s, batch = self.shape, self.batch
        places = s.context + 64
        per_row = -(-places // s.block_size)
        blocks = make.put(make.shuffled(batch * per_row).int())
        self.table = blocks.view(batch, per_row)
        self.rows = make.put(torch.arange(batch, dtype=torch.int32))
        shape = (s.layers, 2, batch * per_row, s.block_size, s.kv_heads, s.head_dim)
        self.pools = make.normal(*shape, dtype=s.dtype)
        table = build_cos_sin(*inverse_frequencies(s.head_dim, 1e4, None, places, places), places, s.dtype)
        self.cos_sin = make.put(table)
        self.first = make.put(torch.arange(batch) % s.vocab)
        self.last, self.one = self.first.clone(), torch.ones_like(self.rows)
        self.computed = torch.full_like(self.rows, s.context)
        self.inputs = DecodeInputs.empty(batch, make.device)
        index = torch.arange(batch)
        rates = [torch.full((batch,), value) for value in (1.0, 1.0, 0.0)]
        columns = (rates[0], torch.full((batch,), 50), rates[1], rates[2], torch.stack((index, index), 1), index, index)
        self.params = DrawParams(*map(make.put, columns))

    def reset(self) -> None:
        """Back to the state before the first step; what later steps read of the pool they write again."""
        self.last.copy_(self.first)
        self.computed.fill_(self.shape.context)

    @property
    def nbytes(self) -> int:
        """What a step must read: weights but for the embedding's other rows, and the rows' keys and values."""
        s = self.shape
        weights = sum(x.nbytes for name, x in self.weights.items() if name != "embedding")
        return weights + 2 * s.layers * self.batch * s.context * s.kv_heads * s.head_dim * s.dtype.itemsize

    def step(self) -> Tensor:
        """Tokens [batch] int64. Everything stays on the device."""
        side: Any = self._side
        inputs, w = self.inputs, self.weights
        side["decode_inputs"](self.rows, self.last, self.computed, self.table, self.shape.block_size, inputs)
        x = F.embedding(inputs.input_ids, w["embedding"])
        for layer in range(self.shape.layers):
            x = x + self._attention(layer, side["rmsnorm"](x, w["norm"], EPS)[0])
            gate_up = F.linear(side["rmsnorm"](x, w["norm"], EPS)[0], w[f"{layer}.gate_up"])
            x = x + F.linear(side["silu_mul"](gate_up), w[f"{layer}.down"])
        self.logits = F.linear(side["rmsnorm"](x, w["norm"], EPS)[0], w["head"]).float()
        tokens = self._draw(self.logits)
        side["commit_tokens"](self.rows, tokens, self.one, self.last, self.computed)
        return tokens

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        s, inputs, side = self.shape, self.inputs, self._side
        heads = F.linear(x, self.weights[f"{layer}.qkv"]).view(self.batch, -1, s.head_dim)
        query, key, value = heads.split((s.heads, s.kv_heads, s.kv_heads), 1)
        keys, values = self.pools[layer]
        side["rope_store_kv"](
            query, key, value, self.cos_sin, inputs.positions, keys, values, inputs.slot_mapping
        )  # fmt: skip
        options = AttentionOptions(scale=s.head_dim**-0.5)
        shared = (keys, values, self.table, self.rows, inputs.context_lens, options, self.num_splits)
        return F.linear(side["paged_decode"](query, *shared).flatten(1), self.weights[f"{layer}.o"])

    def _draw_triton(self, logits: Tensor) -> Tensor:
        columns = (getattr(self.params, name) for name in DrawParams.__slots__)
        return draw_triton(logits, *columns, greedy_below=GREEDY_BELOW)
