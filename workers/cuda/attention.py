"""`DeviceAttention`: a step's attention by the paged kernels, from row state on the device. See `attention.py`.

Decode tokens come first in the batch, then the chunks' tokens, row by row. Padding decode tokens name row -1: their
keys go nowhere (slot -1), their context is empty and their result zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.paged_decode import paged_decode
from slipring.kernels.paged_kv import AttentionOptions
from slipring.kernels.paged_prefill import paged_prefill
from slipring.kernels.rope_store_kv import rope_store_kv
from slipring.workers.attention import Pools


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """B tokens, one a row."""

    rows: Tensor
    """[B] int32"""
    context_lens: Tensor
    """[B] int32, the new token included."""
    num_splits: int


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The new tokens of S rows."""

    rows: Tensor
    """[S] int32"""
    cu_seqlens: Tensor
    """[S + 1] int32"""
    starts: Tensor
    """[S] int32"""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    block_table: Tensor
    positions: Tensor
    """[T] int64"""
    slot_mapping: Tensor
    """[T] int64; negative: not stored."""
    decode: DecodeTokens | None
    chunks: ChunkTokens | None
    before_layer: Callable[[], None] | None = None
    """Called before each layer: a capture that is no longer wanted is left here, by raising."""

    def layer(self, heads: Tensor, value: Tensor, cos_sin: Tensor, pools: Pools, scale: float) -> Tensor:
        if self.before_layer is not None:
            self.before_layer()
        num_heads = heads.shape[1] - value.shape[1]
        query, key = heads[:, :num_heads], heads[:, num_heads:]
        rope_store_kv(query, key, value, cos_sin, self.positions, *pools, self.slot_mapping)
        options, parts = AttentionOptions(scale), []
        num_decode = len(self.decode.rows) if self.decode is not None else 0
        if self.decode is not None:
            parts.append(self._decode(query[:num_decode], pools, self.decode, options))
        if self.chunks is not None:
            parts.append(self._chunks(query[num_decode:], pools, self.chunks, options))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return mixed.view(len(heads), -1)

    def _decode(self, query: Tensor, pools: Pools, tokens: DecodeTokens, options: AttentionOptions) -> Tensor:
        return paged_decode(
            query, *pools, self.block_table, tokens.rows, tokens.context_lens, options, tokens.num_splits
        )

    def _chunks(self, query: Tensor, pools: Pools, tokens: ChunkTokens, options: AttentionOptions) -> Tensor:
        return paged_prefill(
            query,
            *pools,
            self.block_table,
            tokens.rows,
            tokens.cu_seqlens,
            tokens.starts,
            tokens.max_tokens,
            options,
        )
