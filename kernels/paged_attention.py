"""Attention over the paged KV pool for a mixed batch: decode rows in groups, prompt chunks one by one.

Invariants: a step's keys and values are stored before attention reads them; decode tokens come first in the batch,
in the order of `AttentionPlan.groups`, then the chunks in order. Everything that does not depend on the layer (block
indices, masks, groups) is computed once for a step and held in the plan.

Reading positions that do not belong to a row is harmless only while they are finite (0 x NaN is NaN), so padding
repeats the row's own first block, and whoever enters a block clears it first (`workers/kv_cache.py`).

    decode    q [B, KVH, W * G, D]  : the query heads of one KV head, for each of a row's W tokens (its last one and
                                      drafts), are the query length, so KV is never repeated
    chunk     q [KVH, G, n, D]  : KV heads are the batch, and k, v are expanded over G with stride 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context, attended to together."""

    begin: int
    end: int
    """Tokens [begin, end) of the batch."""
    width: int
    """Tokens of each row, stored one after the other at the end of its context."""
    blocks: Tensor
    """[B * num_blocks] int64: each row's blocks, padded with its first."""
    mask: Tensor | None
    """[B, 1, W * G or 1, L] additive, compute dtype; None when every token sees all L positions."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive positions of one row's prompt."""

    begin: int
    end: int
    """Tokens [begin, end) of the batch."""
    length: int
    """Context including the chunk."""
    blocks: Tensor | None
    """[num_blocks] int64; None when the chunk starts at position 0 and is its own whole context."""
    mask: Tensor | None
    """[n, length] additive, causal, compute dtype; None with `blocks`."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What is the same for every layer of one step."""

    slot_mapping: Tensor
    """[T] int64: where each token's key and value are stored."""
    groups: list[DecodeGroup]
    chunks: list[Chunk]


def chunk_mask(start: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[num_tokens, start + num_tokens]: 0 where the key's position is not after the query's, else -inf."""
    full = torch.full((num_tokens, start + num_tokens), float("-inf"), dtype=dtype)
    return full.triu_(start + 1)


def decode_mask(seen: Tensor, padded: int, group_heads: int, dtype: torch.dtype) -> Tensor | None:
    """seen [B, W], how many positions each token of a row sees -> [B, 1, W * G, padded] ([B, 1, 1, padded] for W = 1).

    0 below what is seen, else -inf; None when nothing is masked.
    """
    return _additive(torch.arange(padded) >= seen[:, :, None], group_heads, dtype)


def tree_mask(sees: Tensor, root: Tensor, padded: int, group_heads: int, dtype: torch.dtype) -> Tensor | None:
    """As `decode_mask`, for trees: bit b of sees [B, W] int64: the token sees position root [B] + b; all see what lies
    before the root. The same bits are `paged_prefill`'s tree masks.
    """
    bit = torch.arange(padded) - root[:, None]
    inside = (sees[:, :, None] >> bit.clamp(0, 63)[:, None]) & 1 == 1
    return _additive((bit >= 0)[:, None] & ~(inside & (bit < 64)[:, None]), group_heads, dtype)


def _additive(outside: Tensor, group_heads: int, dtype: torch.dtype) -> Tensor | None:
    """outside [B, W, padded] bool: what a token does not see."""
    if not outside.any():
        return None
    mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, float("-inf"))
    if outside.shape[1] > 1:
        mask = mask.repeat_interleave(group_heads, 1)
    return mask[:, None]


def paged_attention_ref(
    query: Tensor, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """query [T, H, D], key and value [T, KVH, D] of this step; pools [num_blocks, block_size, KVH, D].

    H is a multiple of KVH. Returns [T, H * D] in query's dtype; softmax and sums in fp32 (torch's CPU flash kernel).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty((num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim), dtype=query.dtype)
    for group in plan.groups:
        out[group.begin : group.end] = _decode(grouped, key_pool, value_pool, group, scale)
    for chunk in plan.chunks:
        out[chunk.begin : chunk.end] = _chunk(grouped, key, value, key_pool, value_pool, chunk, scale)
    return out.view(num_tokens, num_heads * head_dim)


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """As `paged_attention_ref`, for the CPU; a GPU's steps go by `paged_decode.py` and `paged_prefill.py`."""
    return paged_attention_ref(query, key, value, key_pool, value_pool, plan, scale)


def _decode(grouped: Tensor, key_pool: Tensor, value_pool: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    _, num_kv_heads, group_heads, head_dim = grouped.shape
    batch, width = (group.end - group.begin) // group.width, group.width
    shape = (batch, -1, *key_pool.shape[2:])
    k = key_pool.index_select(0, group.blocks).view(shape).transpose(1, 2)
    v = value_pool.index_select(0, group.blocks).view(shape).transpose(1, 2)
    q = grouped[group.begin : group.end]
    if width == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    q = q.view(batch, width, num_kv_heads, group_heads, head_dim).transpose(1, 2)
    q = q.reshape(batch, num_kv_heads, width * group_heads, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    out = out.view(batch, num_kv_heads, width, group_heads, head_dim).transpose(1, 2)
    return out.reshape(batch * width, num_kv_heads, group_heads, head_dim)


def _chunk(
    grouped: Tensor, key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, chunk: Chunk, scale: float
) -> Tensor:
    q = grouped[chunk.begin : chunk.end].permute(1, 2, 0, 3)
    if chunk.blocks is None:
        k, v = key[chunk.begin : chunk.end], value[chunk.begin : chunk.end]
    else:
        k = key_pool.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.length]
        v = value_pool.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.length]
    expanded = (*q.shape[:2], chunk.length, q.shape[-1])
    k = k.transpose(0, 1).unsqueeze(1).expand(expanded)
    v = v.transpose(0, 1).unsqueeze(1).expand(expanded)
    causal = chunk.mask is None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=chunk.mask, is_causal=causal, scale=scale)
    return out.permute(2, 0, 1, 3)
