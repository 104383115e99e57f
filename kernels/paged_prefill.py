"""Attention of several new tokens a row over the paged KV pool: prompt chunks, and drafts to be verified.

Flash attention (Dao 2023) over sequences of any lengths. A tile's rows are pairs (token, query head of one KV head),
so keys and values are loaded once for a whole group, and the few drafts of a verified row still fill a tile. Masks
are causal, or a tree among the new tokens themselves: bit j of a token's mask says that it sees new token j.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.paged_kv import AttentionOptions, attend_ref, context_ref, pool_offsets, scale_scores, tile_name
from slipring.kernels.spec import ARCHITECTURES, KernelSpec
from slipring.kernels.tiles import register, tiles

MAX_TREE = 64
"""New tokens of a row under a tree mask: bits of an int64."""
_INDICES = ["ROWS", "CU_SEQLENS", "STARTS", "TREE_MASKS", "POSITIONS"]
"""Often parts of larger buffers: where these begin must not cost a compilation in the middle of serving."""
_SHORT_ROWS = 64
"""Up to this many tile rows (tokens x group) the longest sequence takes the tile for drafts."""


def paged_prefill_ref(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    max_tokens: int,
    options: AttentionOptions,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """query [T, H, D], strided over tokens alone; pools [num_blocks, block_size, KVH, D], H a multiple of KVH.

    block_table [num_rows, max_blocks] int32. Sequence s: new tokens cu_seqlens[s] to cu_seqlens[s + 1] ([S + 1]
    int32; at most max_tokens each), at places starts[s] ([S] int32) and on of the row rows[s] ([S] int32); their
    keys and values are in the pool already. tree: (bit mask [T] int64, position of each token [T] int64, which
    differs from its place; used by the window). Every new token sees itself, and the context subject to the window.
    A window must hold a whole tree. Returns [T, H, D], contiguous, in query's dtype.
    """
    out = query.new_zeros(query.shape)
    bounds = cu_seqlens.tolist()
    for begin, end, row, start in zip(bounds, bounds[1:], rows.tolist(), starts.tolist(), strict=False):
        length = start + end - begin
        keys = context_ref(key_pool, block_table[row], length, options.key_scale)
        values = context_ref(value_pool, block_table[row], length, options.value_scale)
        place = torch.arange(length, device=query.device)
        ours = place[start:, None]
        seen = place <= ours
        if tree is not None:
            masks, positions = (x[begin:end, None] for x in tree)
            seen = (place < start) | ((masks >> (place - start).clamp(0, MAX_TREE - 1)) & 1).bool()
            ours = positions
        if options.window:
            near = place > ours - options.window
            seen &= near if tree is None else near | (place >= start)
        out[begin:end] = attend_ref(query[begin:end], keys, values, seen, options).to(query.dtype)
    return out


@triton.jit(do_not_specialize_on_alignment=_INDICES)
def _prefill_kernel(
    QUERY,
    KEYS,
    VALUES,
    BLOCK_TABLE,
    ROWS,
    CU_SEQLENS,
    STARTS,
    TREE_MASKS,
    POSITIONS,
    OUT,
    scale,
    value_scale,
    stride_query,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_TREE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grid [tiles of the longest sequence, KVH, S]"""
    sequence = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles have most to do: they go first
    first_token = tl.load(CU_SEQLENS + sequence)
    num_tokens = tl.load(CU_SEQLENS + sequence + 1) - first_token
    if tile * BLOCK_M >= num_tokens * GROUP:
        return
    start = tl.load(STARTS + sequence)
    blocks = BLOCK_TABLE + tl.load(ROWS + sequence).to(tl.int64) * stride_table
    line = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = line // GROUP
    head = kv_head * GROUP + line % GROUP
    dim = tl.arange(0, BLOCK_D)
    present = token < num_tokens
    inside = present[:, None] & (dim < HEAD_DIM)[None, :]
    at_query = (first_token + token).to(tl.int64) * stride_query + head * HEAD_DIM
    query = tl.load(QUERY + at_query[:, None] + dim[None, :], inside, 0.0)
    place = start + token
    position = place
    begin = 0
    end = start + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_tokens)
    if WINDOW > 0:
        # From the oldest position that the tile's first token sees (a tree's tokens are no earlier than its start).
        oldest = start if IS_TREE else start + tile * BLOCK_M // GROUP
        begin = tl.maximum(oldest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if IS_TREE:
        masks = tl.load(TREE_MASKS + first_token + token, present, 0)
        end = start + num_tokens
        if WINDOW > 0:
            position = tl.load(POSITIONS + first_token + token, present, 0).to(tl.int32)
    best = tl.full([BLOCK_M], -1e30, tl.float32)  # finite, so that no difference of two infinities can arise
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(begin, end, BLOCK_N):
        other = at + tl.arange(0, BLOCK_N)
        valid = other < end
        offsets = pool_offsets(blocks, other, valid, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        key = tl.load(KEYS + offsets[None, :] + dim[:, None], valid[None, :] & (dim < HEAD_DIM)[:, None], 0.0)
        scores = scale_scores(tl.dot(query, key.to(query.dtype), input_precision=PRECISION), scale, SOFT_CAP)
        if IS_TREE:
            # Places past the tree are masked, but a shift by 64 bits and more has no meaning, whoever looks at it.
            node = tl.minimum(tl.maximum(other - start, 0), 63).to(tl.int64)
            seen = (other < start)[None, :] | (((masks[:, None] >> node[None, :]) & 1) == 1)
        else:
            seen = other[None, :] <= place[:, None]
        if WINDOW > 0:
            near = other[None, :] > position[:, None] - WINDOW
            if IS_TREE:
                near = near | (other >= start)[None, :]
            seen = seen & near
        scores = tl.where(seen & valid[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        decay = tl.exp2(best - new_best)
        total = total * decay + tl.sum(weights, 1)
        value = tl.load(VALUES + offsets[:, None] + dim[None, :], valid[:, None] & (dim < HEAD_DIM)[None, :], 0.0)
        value = value.to(query.dtype)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
        best = new_best
    mixed = mixed * (value_scale / tl.maximum(total, 1e-30))[:, None]
    at_out = ((first_token + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(OUT + at_out[:, None] + dim[None, :], mixed.to(OUT.dtype.element_ty), inside)


def paged_prefill_triton(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    max_tokens: int,
    options: AttentionOptions,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `paged_prefill_ref`. Raises ValueError for a tree that its mask or the window cannot hold."""
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_pool.shape
    if query.stride()[1:] != (head_dim, 1):
        raise ValueError("query may be strided over tokens alone")
    if tree is not None and max_tokens > (min(MAX_TREE, options.window) if options.window else MAX_TREE):
        raise ValueError(f"a tree of {max_tokens} tokens does not fit its mask ({MAX_TREE}) or window")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    masks, positions = tree or (starts, starts)
    group, block_d = num_heads // num_kv_heads, int(triton.next_power_of_2(head_dim))
    short = tree is not None or max_tokens * group <= _SHORT_ROWS  # a tree's mask would make the large tile spill
    kind = "draft" if short and query.dtype != torch.float32 else "prefill"
    tile = tiles(tile_name(kind, query.dtype, block_d))
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": options.window,
        "SOFT_CAP": options.soft_cap,
        "IS_TREE": tree is not None,
        "BLOCK_D": block_d,
    }
    _prefill_kernel[(triton.cdiv(max_tokens * group, tile["BLOCK_M"]), num_kv_heads, len(starts))](
        query,
        key_pool,
        value_pool,
        block_table,
        rows,
        cu_seqlens,
        starts,
        masks,
        positions,
        out,
        options.scale * options.key_scale,
        options.value_scale,
        query.stride(0),
        block_table.stride(0),
        **constants,
        **tile,
    )
    return out


def paged_prefill(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    rows: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    max_tokens: int,
    options: AttentionOptions,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `paged_prefill_ref`, on query's device."""
    run = paged_prefill_triton if query.is_cuda else paged_prefill_ref
    return run(query, key_pool, value_pool, block_table, rows, cu_seqlens, starts, max_tokens, options, tree)


def _tile(m: int, n: int, warps: int, stages: int, precision: str = "ieee") -> dict[str, Any]:
    """`precision` says how fp32 is multiplied, and means nothing to narrower types."""
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages, "PRECISION": precision}


register("paged_prefill_d64", sm_90=_tile(128, 64, 8, 2), sm_100=_tile(128, 128, 8, 2), gfx942=_tile(128, 32, 4, 1))
register("paged_prefill_d128", sm_90=_tile(128, 64, 8, 2), sm_100=_tile(128, 64, 8, 2), gfx942=_tile(128, 32, 4, 1))
register("paged_prefill_d256", sm_90=_tile(128, 32, 8, 2), sm_100=_tile(128, 32, 8, 2), gfx942=_tile(64, 32, 4, 1))
register("paged_draft_d64", sm_90=_tile(32, 64, 4, 2), sm_100=_tile(32, 64, 4, 2), gfx942=_tile(32, 32, 4, 1))
register("paged_draft_d128", sm_90=_tile(32, 64, 4, 2), sm_100=_tile(32, 64, 4, 2), gfx942=_tile(32, 32, 4, 1))
register("paged_draft_d256", sm_90=_tile(32, 32, 4, 2), sm_100=_tile(32, 32, 4, 2), gfx942=_tile(32, 32, 4, 1))
_FP32 = {"any": _tile(16, 32, 4, 1, "tf32x3"), "gfx942": _tile(16, 32, 4, 1)}
"""fp32 on NVIDIA is multiplied in three TF32 products ("tf32x3"), not in plain fp32 ("ieee"). Error: two parts of 11
bits hold a number to 2^-22, and the product that is left out is as small, so a score of 10 is off by about 1e-5 with
the tensor cores' truncated sums; fp32 itself rounds it to 1e-6, and what "equal" excuses begins at 1e-3. The
interpreter of the tests multiplies the same three products, and their fp32 tolerance holds. Cost: three passes of the
TF32 units are more than twice as fast as the fp32 pipes; "ieee" spills on sm_90 even with this smallest tile, and
larger tiles spill with either. One TF32 product ("tf32") is off by 1e-3 to 1e-2: tests fail with it."""
register("paged_prefill_fp32_d64", **_FP32)
register("paged_prefill_fp32_d128", **_FP32)


def _spec(
    kind: str,
    dtype: str,
    pool: str,
    head_dim: int,
    group: int,
    is_tree: bool = False,
    gemma: bool = False,
    architectures: tuple[str, ...] = ARCHITECTURES,
) -> KernelSpec:
    pointers = {"QUERY": f"*{dtype}", "KEYS": f"*{pool}", "VALUES": f"*{pool}", "OUT": f"*{dtype}"}
    pointers |= dict.fromkeys(("BLOCK_TABLE", "ROWS", "CU_SEQLENS", "STARTS"), "*i32")
    pointers |= dict.fromkeys(("TREE_MASKS", "POSITIONS"), "*i64" if is_tree else "*i32")
    scalars = {"scale": "fp32", "value_scale": "fp32", "stride_query": "i32", "stride_table": "i32"}
    suffix = ("_tree" if is_tree else "") + ("_gemma" if gemma else "")
    return KernelSpec(
        name=f"paged_{kind}.{dtype}_{pool}kv_d{head_dim}_g{group}{suffix}",
        kernel=_prefill_kernel,
        signature=pointers | scalars,
        constants={
            "NUM_KV_HEADS": 8,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "WINDOW": 4096 if gemma else 0,
            "SOFT_CAP": 50.0 if gemma else 0.0,
            "IS_TREE": is_tree,
            "BLOCK_D": head_dim,
        },
        tiles=f"paged_{'prefill_fp32' if dtype == 'fp32' else kind}_d{head_dim}",
        matrix=None if dtype == "fp32" else "fp16",
        divisible_by_16=(*(name for name in pointers if name not in _INDICES), "stride_query"),
        architectures=architectures,
    )


SPECS = (
    _spec("prefill", "bf16", "bf16", 128, 4),
    _spec("prefill", "fp16", "fp16", 64, 3),
    _spec("prefill", "bf16", "fp8e4nv", 128, 8, architectures=("sm_90", "sm_100")),
    _spec("prefill", "bf16", "fp8e4b8", 128, 8, architectures=("gfx942",)),
    _spec("prefill", "bf16", "bf16", 256, 2, gemma=True),
    _spec("draft", "bf16", "bf16", 128, 4),
    _spec("draft", "bf16", "bf16", 256, 2, is_tree=True, gemma=True),
    _spec("draft", "fp16", "fp16", 64, 3, is_tree=True),
    _spec("draft", "bf16", "fp8e4nv", 128, 4, is_tree=True, architectures=("sm_90", "sm_100")),
    _spec("draft", "bf16", "fp8e4b8", 128, 4, is_tree=True, architectures=("gfx942",)),
    _spec("prefill", "fp32", "fp32", 64, 3),
    _spec("draft", "fp32", "fp32", 128, 4, is_tree=True),
)
