"""What the kernels over the paged KV pool share: its dtypes and scales, and the reference's view of one row.

A layer's pools are [num_blocks, block_size, KVH, D] for keys and for values, in bf16, fp16, fp32 or fp8 (e4m3; on
MI300X its e4m3fnuz form). An fp8 pool holds value / scale, saturated, with one scale for a layer's keys and one for
its values; other pools hold the value itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer's attention is told besides its tensors."""

    scale: float
    """Factor on query x key, usually D ** -0.5."""
    window: int = 0
    """A query sees this many last positions, itself included; 0 for all."""
    soft_cap: float = 0.0
    """Scores become cap x tanh(score / cap) (Gemma 2); 0 for none."""
    key_scale: float = 1.0
    value_scale: float = 1.0
    """What a pool's stored numbers are multiplied by."""


def pool_limit(dtype: torch.dtype) -> float:
    """Largest magnitude that a pool stores; 0 when it does not saturate."""
    return torch.finfo(dtype).max if dtype in FP8 else 0.0


def to_pool_ref(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x as a pool of this dtype stores it. NaN stays NaN."""
    if dtype not in FP8:
        return x.to(dtype)
    limit = pool_limit(dtype)
    return (x.float() * (1 / scale)).clamp(-limit, limit).to(dtype)


def context_ref(pool: Tensor, blocks: Tensor, length: int, scale: float) -> Tensor:
    """The first `length` positions of a row with these blocks ([n] integers): [length, KVH, D] float32."""
    num_blocks = -(-length // pool.shape[1])
    return pool[blocks[:num_blocks].long()].flatten(0, 1)[:length].float() * scale


def attend_ref(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, options: AttentionOptions) -> Tensor:
    """query [n, H, D], keys and values [L, KVH, D] float32, seen [n, L] bool -> [n, H, D] float32.

    A query that sees nothing gives zeros.
    """
    num_groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(num_groups, 1) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), keys) * options.scale
    if options.soft_cap:
        scores = options.soft_cap * (scores / options.soft_cap).tanh()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hnl,lhd->nhd", weights, values)


def tile_name(kind: str, dtype: torch.dtype, block_d: int) -> str:
    """Row of the tile table for head sizes up to `block_d`. Raises ValueError where no tile compiles without spills."""
    largest = 128 if dtype == torch.float32 else 256
    if block_d > largest:
        raise ValueError(f"attention in {dtype} takes heads of at most {largest} on a GPU, this model has {block_d}")
    return f"paged_{kind}{'_fp32' if dtype == torch.float32 else ''}_d{max(64, block_d)}"


@triton.jit
def scale_scores(scores, scale, SOFT_CAP: tl.constexpr):
    """Raw products -> scores in units of log 2, so that softmax needs exp2 alone."""
    if SOFT_CAP > 0:
        # tanh(u) = 2 sigmoid(2 u) - 1
        return (2.0 / (1.0 + tl.exp(scores * (-2.0 * scale / SOFT_CAP))) - 1.0) * (SOFT_CAP * 1.4426950408889634)
    return scores * (scale * 1.4426950408889634)


@triton.jit
def pool_offsets(BLOCKS, positions, inside, kv_head, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Element offset in a pool of each position of the row whose block list starts at BLOCKS; SIZE is block_size."""
    block = tl.load(BLOCKS + positions // SIZE, inside, 0).to(tl.int64)
    return ((block * SIZE + positions % SIZE) * NUM_KV_HEADS + kv_head) * D
