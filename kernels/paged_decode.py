"""Attention of one new token a row over the paged KV pool: flash decoding (Dao et al. 2023) with grouped queries.

Each row's context is cut into NUM_SPLITS parts. The partial kernel attends to one part for the query heads of one KV
head and leaves its softmax-weighted values and the logarithm of its weights' sum; the combine kernel merges the
parts (one part needs no merge). Rows, lengths and block tables are read from device memory, so a captured graph
serves any of them; only NUM_SPLITS is baked in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.paged_kv import AttentionOptions, attend_ref, context_ref, pool_offsets, scale_scores, tile_name
from slipring.kernels.spec import ARCHITECTURES, KernelSpec
from slipring.kernels.tiles import register, tiles


def paged_decode_ref(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    options: AttentionOptions,
    num_splits: int = 1,
) -> Tensor:
    """query [B, H, D], strided over tokens alone; pools [num_blocks, block_size, KVH, D], H a multiple of KVH.

    block_table [num_rows, max_blocks] int32, rows [B] int32 (its line for each query), context_lens [B] int32 with
    the new token included. A query with context_lens 0 (padding) gives zeros. Returns [B, H, D], contiguous, in
    query's dtype. `num_splits` (a power of two) does not change the result beyond rounding.
    """
    out = query.new_zeros(query.shape)
    for i, (row, length) in enumerate(zip(rows.tolist(), context_lens.tolist(), strict=True)):
        if length:
            keys = context_ref(key_pool, block_table[row], length, options.key_scale)
            values = context_ref(value_pool, block_table[row], length, options.value_scale)
            seen = torch.arange(length, device=query.device) >= (length - options.window if options.window else 0)
            out[i] = attend_ref(query[i : i + 1], keys, values, seen[None], options)[0]
    return out


_INDICES = ["ROWS", "CONTEXT_LENS"]
"""Often parts of larger buffers: where these begin must not cost a compilation in the middle of serving."""


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _partial_kernel(
    QUERY,
    KEYS,
    VALUES,
    BLOCK_TABLE,
    ROWS,
    CONTEXT_LENS,
    PARTIAL,
    LOG_SUMS,
    scale,
    value_scale,
    stride_query,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid [B, KVH, NUM_SPLITS]. BLOCK_G is GROUP padded to the 16 rows that a matrix instruction takes."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(CONTEXT_LENS + token)
    blocks = BLOCK_TABLE + tl.maximum(tl.load(ROWS + token), 0).to(tl.int64) * stride_table  # padding may name row -1
    window_begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(length - window_begin, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = window_begin + split * share
    end = tl.minimum(begin + share, length)
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + group
    inside = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query = tl.load(QUERY + token * stride_query + heads[:, None] * HEAD_DIM + dim[None, :], inside, 0.0)
    # A finite start, so that no difference of two infinities can arise.
    best = tl.full([BLOCK_G], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for at in range(begin, end, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        valid = position < end
        offsets = pool_offsets(blocks, position, valid, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        key = tl.load(KEYS + offsets[None, :] + dim[:, None], valid[None, :] & (dim < HEAD_DIM)[:, None], 0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION)
        scores = tl.where(valid[None, :], scale_scores(scores, scale, SOFT_CAP), -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weights, 1)
        value = tl.load(VALUES + offsets[:, None] + dim[None, :], valid[:, None] & (dim < HEAD_DIM)[None, :], 0.0)
        value = value.to(query.dtype)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        best = new_best
    out = ((token * NUM_KV_HEADS * GROUP + heads) * NUM_SPLITS + split).to(tl.int64)
    mixed = mixed * (value_scale / tl.maximum(total, 1e-30))[:, None]  # zeros for an empty part
    tl.store(PARTIAL + out[:, None] * HEAD_DIM + dim[None, :], mixed.to(PARTIAL.dtype.element_ty), inside)
    if NUM_SPLITS > 1:
        tl.store(LOG_SUMS + out, best + tl.log2(tl.maximum(total, 1e-30)), group < GROUP)


@triton.jit
def _combine_kernel(PARTIAL, LOG_SUMS, OUT, NUM_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """grid [B * H]. An empty part's logarithm is about -1e30: its weight is 0, or its values are zeros anyway."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, NUM_SPLITS)
    dim = tl.arange(0, BLOCK_D)
    log_sums = tl.load(LOG_SUMS + head * NUM_SPLITS + split)
    weights = tl.exp2(log_sums - tl.max(log_sums, 0))
    weights = weights / tl.sum(weights, 0)
    at = (head * NUM_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    partial = tl.load(PARTIAL + at, (dim < HEAD_DIM)[None, :], 0.0)
    mixed = tl.sum(partial * weights[:, None], 0)
    tl.store(OUT + head * HEAD_DIM + dim, mixed.to(OUT.dtype.element_ty), dim < HEAD_DIM)


def choose_num_splits(batch: int, num_kv_heads: int, max_context: int, num_processors: int) -> int:
    """Parts that give every processor about two programs, none of them with less than 256 positions. At most 32."""
    wanted = -(-2 * num_processors // (batch * num_kv_heads))
    useful = max_context // 256
    return 1 << (max(1, min(wanted, useful, 32)).bit_length() - 1)


def paged_decode_triton(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    options: AttentionOptions,
    num_splits: int = 1,
) -> Tensor:
    """As `paged_decode_ref`."""
    batch, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_pool.shape
    if query.stride()[1:] != (head_dim, 1):
        raise ValueError("query may be strided over tokens alone")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    partial = log_sums = out
    if num_splits > 1:
        partial = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
        log_sums = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=query.device)
    block_d, group = int(triton.next_power_of_2(head_dim)), num_heads // num_kv_heads
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "NUM_SPLITS": num_splits,
        "WINDOW": options.window,
        "SOFT_CAP": options.soft_cap,
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "BLOCK_D": block_d,
    }
    _partial_kernel[(batch, num_kv_heads, num_splits)](
        query,
        key_pool,
        value_pool,
        block_table,
        rows,
        context_lens,
        partial,
        log_sums,
        options.scale * options.key_scale,
        options.value_scale,
        query.stride(0),
        block_table.stride(0),
        **constants,
        **tiles(tile_name("decode", query.dtype, block_d)),
    )
    if num_splits > 1:
        constants = {name: constants[name] for name in ("NUM_SPLITS", "HEAD_DIM", "BLOCK_D")}
        tile = tiles("paged_decode_combine")
        _combine_kernel[(batch * num_heads,)](partial, log_sums, out, **constants, **tile)
    return out


def paged_decode(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    options: AttentionOptions,
    num_splits: int = 1,
) -> Tensor:
    """As `paged_decode_ref`, on query's device."""
    run = paged_decode_triton if query.is_cuda else paged_decode_ref
    return run(query, key_pool, value_pool, block_table, rows, context_lens, options, num_splits)


_NARROW = {"BLOCK_N": 64, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}
_WIDE = _NARROW | {"BLOCK_N": 32}
register("paged_decode_d64", any=_NARROW)
register("paged_decode_d128", any=_NARROW)
register("paged_decode_d256", any=_WIDE)
_FP32 = {"BLOCK_N": 32, "PRECISION": "tf32x3", "num_warps": 4, "num_stages": 1}  # see paged_prefill.py
register("paged_decode_fp32_d64", any=_FP32, gfx942=_FP32 | {"PRECISION": "ieee"})
register("paged_decode_fp32_d128", any=_FP32, gfx942=_FP32 | {"PRECISION": "ieee"})
register("paged_decode_combine", any={"num_warps": 4, "num_stages": 1})


def _spec(
    dtype: str,
    pool: str,
    head_dim: int,
    group: int,
    num_splits: int,
    gemma: bool = False,
    architectures: tuple[str, ...] = ARCHITECTURES,
) -> KernelSpec:
    partial = "fp32" if num_splits > 1 else dtype
    pointers = {"QUERY": f"*{dtype}", "KEYS": f"*{pool}", "VALUES": f"*{pool}", "BLOCK_TABLE": "*i32", "ROWS": "*i32"}
    pointers |= {"CONTEXT_LENS": "*i32", "PARTIAL": f"*{partial}", "LOG_SUMS": f"*{partial}"}
    scalars = {"scale": "fp32", "value_scale": "fp32", "stride_query": "i32", "stride_table": "i32"}
    family = "_gemma" if gemma else ""
    return KernelSpec(
        name=f"paged_decode.{dtype}_{pool}kv_d{head_dim}_g{group}_s{num_splits}{family}",
        kernel=_partial_kernel,
        signature=pointers | scalars,
        constants={
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "NUM_SPLITS": num_splits,
            "WINDOW": 4096 if gemma else 0,
            "SOFT_CAP": 50.0 if gemma else 0.0,
            "BLOCK_G": 16,
            "BLOCK_D": head_dim,
        },
        tiles=f"paged_decode{'_fp32' if dtype == 'fp32' else ''}_d{head_dim}",
        matrix=None if dtype == "fp32" else "fp16",
        divisible_by_16=(*(name for name in pointers if name not in _INDICES), "stride_query"),
        architectures=architectures,
    )


SPECS = (
    _spec("bf16", "bf16", 128, 4, 8),
    _spec("bf16", "bf16", 64, 3, 1),
    _spec("fp16", "fp16", 128, 8, 1),
    _spec("bf16", "fp8e4nv", 128, 8, 8, architectures=("sm_90", "sm_100")),
    _spec("fp16", "fp8e4nv", 64, 3, 8, architectures=("sm_90", "sm_100")),
    _spec("bf16", "fp8e4b8", 128, 8, 8, architectures=("gfx942",)),
    _spec("bf16", "bf16", 256, 2, 8, gemma=True),
    _spec("fp32", "fp32", 64, 3, 1),
    _spec("fp32", "fp32", 128, 4, 8),
    *(
        KernelSpec(
            name=f"paged_decode_combine.{dtype}_d{head_dim}_s{num_splits}",
            kernel=_combine_kernel,
            signature={"PARTIAL": "*fp32", "LOG_SUMS": "*fp32", "OUT": f"*{dtype}"},
            constants={"NUM_SPLITS": num_splits, "HEAD_DIM": head_dim, "BLOCK_D": head_dim},
            tiles="paged_decode_combine",
            divisible_by_16=("PARTIAL", "LOG_SUMS", "OUT"),
        )
        for dtype, head_dim, num_splits in (("bf16", 128, 8), ("fp16", 64, 32), ("bf16", 256, 32), ("fp32", 128, 8))
    ),
)
