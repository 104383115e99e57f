"""RoPE on queries and keys, fused with the write of keys and values into the paged pool (`rope.py`, `store_kv.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.paged_kv import pool_limit, to_pool_ref
from slipring.kernels.rope import rope_ref
from slipring.kernels.spec import ARCHITECTURES, KernelSpec
from slipring.kernels.tiles import register, tiles


def rope_store_kv_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Turns query in place, and stores turned key and value; key and value themselves are not changed.

    query [T, H, D], key and value [T, KVH, D]: views, strided over tokens alone. cos_sin [P, 2, D] from
    `build_cos_sin`, positions [T] int64. Pools [num_blocks, block_size, KVH, D] (`paged_kv.py`); slot_mapping [T]
    int64, distinct, negative for tokens that are not stored.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(2).unbind(1)
    query.copy_(rope_ref(query, cos, sin))
    stored = slot_mapping >= 0
    for new, pool, scale in ((rope_ref(key, cos, sin), key_pool, key_scale), (value, value_pool, value_scale)):
        # Bytes, because torch indexes no fp8 tensors on the CPU.
        flat = pool.view(-1, *pool.shape[2:]).view(torch.uint8)
        flat[slot_mapping[stored]] = to_pool_ref(new[stored], pool.dtype, scale).view(torch.uint8)


@triton.jit
def _rotated(BASE, offsets, inside, cos, sin, HALF: tl.constexpr):
    """The two halves of heads at BASE + offsets, turned, rounded where `rope_ref` rounds; fp32 holding x's dtype."""
    first = tl.load(BASE + offsets, inside, 0.0)
    second = tl.load(BASE + offsets + HALF, inside, 0.0)
    dtype: tl.constexpr = BASE.dtype.element_ty
    first_cos = (first.to(tl.float32) * cos).to(dtype).to(tl.float32)
    second_cos = (second.to(tl.float32) * cos).to(dtype).to(tl.float32)
    turned_first = (first_cos - second.to(tl.float32) * sin).to(dtype)
    turned_second = (second_cos + first.to(tl.float32) * sin).to(dtype)
    return turned_first, turned_second


@triton.jit
def _to_pool(x, POOL, inverse_scale, LIMIT: tl.constexpr):
    """As `to_pool_ref`."""
    if LIMIT > 0:
        x = x.to(tl.float32) * inverse_scale
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x.to(POOL.dtype.element_ty)


_INDICES = ["POSITIONS", "SLOTS"]
"""Often parts of larger buffers: where these begin must not cost a compilation in the middle of serving."""


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _rope_store_kv_kernel(
    QUERY,
    KEY,
    VALUE,
    COS_SIN,
    POSITIONS,
    SLOTS,
    KEY_POOL,
    VALUE_POOL,
    stride_query,
    stride_key,
    stride_value,
    inverse_key_scale,
    inverse_value_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """grid [T, parts of BLOCK_HEADS query heads, then parts of as many KV heads]"""
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    table = COS_SIN + tl.load(POSITIONS + token) * (2 * HEAD_DIM) + pair
    cos = tl.load(table, pair < HALF, 0.0).to(tl.float32)[None, :]
    sin = tl.load(table + HEAD_DIM + HALF, pair < HALF, 0.0).to(tl.float32)[None, :]  # the half that is not negated
    heads = tl.arange(0, BLOCK_HEADS)
    if part < QUERY_PARTS:
        heads += part * BLOCK_HEADS
        inside = (heads < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
        offsets = token * stride_query + heads[:, None] * HEAD_DIM + pair[None, :]
        first, second = _rotated(QUERY, offsets, inside, cos, sin, HALF)
        tl.store(QUERY + offsets, first, inside)
        tl.store(QUERY + offsets + HALF, second, inside)
    else:
        slot = tl.load(SLOTS + token).to(tl.int64)
        heads += (part - QUERY_PARTS) * BLOCK_HEADS
        inside = (heads < NUM_KV_HEADS)[:, None] & (pair < HALF)[None, :] & (slot >= 0)
        head_offsets = heads[:, None] * HEAD_DIM + pair[None, :]
        target = slot * (NUM_KV_HEADS * HEAD_DIM) + head_offsets
        first, second = _rotated(KEY, token * stride_key + head_offsets, inside, cos, sin, HALF)
        tl.store(KEY_POOL + target, _to_pool(first, KEY_POOL, inverse_key_scale, LIMIT), inside)
        tl.store(KEY_POOL + target + HALF, _to_pool(second, KEY_POOL, inverse_key_scale, LIMIT), inside)
        source = VALUE + token * stride_value + head_offsets
        first = tl.load(source, inside, 0.0)
        second = tl.load(source + HALF, inside, 0.0)
        tl.store(VALUE_POOL + target, _to_pool(first, VALUE_POOL, inverse_value_scale, LIMIT), inside)
        tl.store(VALUE_POOL + target + HALF, _to_pool(second, VALUE_POOL, inverse_value_scale, LIMIT), inside)


def rope_store_kv_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """As `rope_store_kv_ref`."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if any(x.stride()[1:] != (head_dim, 1) for x in (query, key, value)):
        raise ValueError("query, key and value may be strided over tokens alone")
    tile = tiles("rope_store_kv")
    constants: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "LIMIT": pool_limit(key_pool.dtype),
        "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
    }
    parts = sum(triton.cdiv(count, tile["BLOCK_HEADS"]) for count in (num_heads, num_kv_heads))
    _rope_store_kv_kernel[(num_tokens, parts)](
        query,
        key,
        value,
        cos_sin,
        positions,
        slot_mapping,
        key_pool,
        value_pool,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        1 / key_scale,
        1 / value_scale,
        **constants,
        **tile,
    )


def rope_store_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_mapping: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """As `rope_store_kv_ref`, on query's device."""
    run = rope_store_kv_triton if query.is_cuda else rope_store_kv_ref
    run(query, key, value, cos_sin, positions, key_pool, value_pool, slot_mapping, key_scale, value_scale)


register("rope_store_kv", any={"BLOCK_HEADS": 4, "num_warps": 2, "num_stages": 1})


def _spec(dtype: str, pool: str, limit: float, head_dim: int, architectures: tuple[str, ...]) -> KernelSpec:
    pointers = {name: f"*{dtype}" for name in ("QUERY", "KEY", "VALUE", "COS_SIN")}
    pointers |= {"POSITIONS": "*i64", "SLOTS": "*i64", "KEY_POOL": f"*{pool}", "VALUE_POOL": f"*{pool}"}
    strides = dict.fromkeys(("stride_query", "stride_key", "stride_value"), "i32")
    return KernelSpec(
        name=f"rope_store_kv.{dtype}_{pool}kv_d{head_dim}",
        kernel=_rope_store_kv_kernel,
        signature=pointers | strides | dict.fromkeys(("inverse_key_scale", "inverse_value_scale"), "fp32"),
        constants={
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "LIMIT": limit,
            "BLOCK_HALF": head_dim // 2,
        },
        tiles="rope_store_kv",
        divisible_by_16=(*(name for name in pointers if name not in _INDICES), *strides),
        architectures=architectures,
    )


SPECS = (
    _spec("bf16", "bf16", 0.0, 128, ARCHITECTURES),
    _spec("fp16", "fp16", 0.0, 64, ARCHITECTURES),
    _spec("fp32", "fp32", 0.0, 128, ARCHITECTURES),
    _spec("bf16", "fp8e4nv", 448.0, 128, ("sm_90", "sm_100")),
    _spec("bf16", "fp8e4b8", 240.0, 128, ("gfx942",)),
    _spec("fp16", "fp8e4nv", 448.0, 64, ("sm_90", "sm_100")),
)
