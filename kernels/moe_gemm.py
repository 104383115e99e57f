"""The experts' products as one grouped GEMM over slots sorted by expert (`moe_route.py`).

A layer calls it twice: with x [T, K] (every slot of a token reads the token's row) for gate and up, then with the
activation's result [T * k, K] (every slot has its own row) for down, where the router's weight is applied. The sum over
a token's k slots is the caller's: the result is ordered by slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.moe_route import SortedSlots
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def moe_gemm_ref(x: Tensor, weight: Tensor, sorted_slots: SortedSlots, num_slots: int, router: Tensor | None) -> Tensor:
    """x [num_slots or T, K] (T divides num_slots), weight [E, N, K], router [num_slots] float32 -> [num_slots, N].

    Rows of slots that were left out of `sorted_slots` are zero.
    """
    y = x.new_zeros(num_slots, weight.shape[1])
    rows_per_x = num_slots // x.shape[0]
    num_tiles = int(sorted_slots.num_rows) // sorted_slots.tile_rows
    by_tile = sorted_slots.slots.view(-1, sorted_slots.tile_rows)[:num_tiles].long()
    for expert in sorted_slots.tile_expert[:num_tiles].unique().tolist():
        slots = by_tile[sorted_slots.tile_expert[:num_tiles] == expert].flatten()
        slots = slots[slots < num_slots]
        product = x[slots // rows_per_x].float() @ weight[expert].float().T
        if router is not None:
            product *= router[slots].unsqueeze(1)
        y[slots] = product.to(y.dtype)
    return y


# The number of tokens is no reason to compile anew: that would happen in the middle of serving.
@triton.jit(do_not_specialize=["num_slots", "rows_per_x"])
def moe_gemm_kernel(
    X, W, SLOTS, TILE_EXPERT, NUM_ROWS, ROUTER, Y, num_slots, rows_per_x, N, K,
    HAS_ROUTER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program for a tile of BM sorted slots and BN columns. A padding slot has the number of slots."""
    if tl.program_id(0) * BM >= tl.load(NUM_ROWS):
        return
    slot = tl.load(SLOTS + tl.program_id(0) * BM + tl.arange(0, BM))
    expert = tl.load(TILE_EXPERT + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_at = X + (slot // rows_per_x).to(tl.int64)[:, None] * K + inner[None, :]
    w_at = W + (expert * N + column)[None, :] * K + inner[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        x = tl.load(x_at, (slot < num_slots)[:, None] & (inner < K - begin)[None, :], 0.0)
        w = tl.load(w_at, (column < N)[None, :] & (inner < K - begin)[:, None], 0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_at += BK
        w_at += BK
    if HAS_ROUTER:
        total *= tl.load(ROUTER + slot, slot < num_slots, 0.0)[:, None]
    y_at = Y + slot.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_at, total.to(Y.dtype.element_ty), (slot < num_slots)[:, None] & (column < N)[None, :])


register("moe_gemm.16", any={"BM": 16, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 3},
         gfx942={"BM": 16, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 1})  # fmt: skip
register("moe_gemm.64", any={"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4},
         gfx942={"BM": 64, "BN": 128, "BK": 64, "num_warps": 4, "num_stages": 2})  # fmt: skip
register("moe_gemm.128", any={"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
         gfx942={"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 2})  # fmt: skip


def choose_tile_rows(num_slots: int, num_experts: int) -> int:
    """`tile_rows` to sort with: low tiles while an expert gets few slots, or most of a tile would be padding."""
    per_expert = num_slots / num_experts
    return 16 if per_expert <= 16 else 64 if per_expert <= 96 else 128


def moe_gemm_triton(
    x: Tensor, weight: Tensor, sorted_slots: SortedSlots, num_slots: int, router: Tensor | None
) -> Tensor:
    """As `moe_gemm_ref`; all contiguous, `sorted_slots` sorted with a `choose_tile_rows`."""
    y = torch.zeros(num_slots, weight.shape[1], device=x.device, dtype=x.dtype)
    tile = tiles(f"moe_gemm.{sorted_slots.tile_rows}")
    grid = (len(sorted_slots.tile_expert), triton.cdiv(weight.shape[1], tile["BN"]))
    moe_gemm_kernel[grid](
        x, weight, sorted_slots.slots, sorted_slots.tile_expert, sorted_slots.num_rows, x if router is None else router,
        y, num_slots, num_slots // x.shape[0], weight.shape[1], weight.shape[2], HAS_ROUTER=router is not None, **tile,
    )  # fmt: skip
    return y


def moe_gemm(
    x: Tensor, weight: Tensor, sorted_slots: SortedSlots, num_slots: int, router: Tensor | None = None
) -> Tensor:
    """As `moe_gemm_ref`, on whatever device the tensors are."""
    return (moe_gemm_triton if x.is_cuda else moe_gemm_ref)(x, weight, sorted_slots, num_slots, router)


def _specs() -> tuple[KernelSpec, ...]:
    types = {"SLOTS": "*i32", "TILE_EXPERT": "*i32", "NUM_ROWS": "*i32", "ROUTER": "*fp32"}
    types |= {name: "i32" for name in ("num_slots", "rows_per_x", "N", "K")}
    variants = [("bf16", rows, has_router) for rows in (16, 64, 128) for has_router in (False, True)]
    return tuple(
        KernelSpec(
            f"moe_gemm.{dtype}.{rows}{'.router' if has_router else ''}", moe_gemm_kernel,
            types | {name: f"*{dtype}" for name in ("X", "W", "Y")}, {"HAS_ROUTER": has_router},
            f"moe_gemm.{rows}", "fp16", ("X", "W", "Y", "SLOTS", "ROUTER", "N", "K"),
        )
        for dtype, rows, has_router in (*variants, ("fp16", 128, True))
    )  # fmt: skip


SPECS = _specs()
