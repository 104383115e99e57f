"""`y = (A * a_scale) (B * b_scale)^T`, with A and B in fp8 (e4m3) and the sum in fp32.

Three forms of scales, told apart by their shapes:

=============  ==================  ==========================  =====================================
form           a_scale             b_scale                     checkpoints
=============  ==================  ==========================  =====================================
per tensor     [1]                 [1]                         compressed-tensors, static or dynamic
per row        [M, 1] or [1]       [N, 1] or [1]               compressed-tensors, token x channel
DeepSeek       [M, ceil(K/128)]    [ceil(N/128), ceil(K/128)]  `weight_scale_inv`
=============  ==================  ==========================  =====================================

The tensor cores of Hopper add fp8 products with few bits, so every 128 columns their sum goes into an fp32
accumulator; there the scales of a DeepSeek block are applied as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles

BLOCK_SCALE = 128
_FEW_ROWS = 64
"""Up to this many rows of A, a narrow tile: decode steps are bound by reading B."""


def is_block_scaled(b_scale: Tensor, num_columns: int) -> bool:
    """Whether b_scale has DeepSeek's form. [1, 1] for up to 128 columns and K is the same as per tensor."""
    return (
        b_scale.dim() == 2 and b_scale.shape[0] == -(-num_columns // BLOCK_SCALE) and b_scale.shape != (num_columns, 1)
    )


def fp8_gemm_ref(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """a [M, K] fp8, b [N, K] fp8, scales float32 as in the table, bias [N] -> [M, N] of `dtype`."""
    wide_a, wide_b = a.float(), b.float()
    if is_block_scaled(b_scale, b.shape[0]):
        wide_a = wide_a * _spread(a_scale, 1, a.shape[1])
        wide_b = wide_b * _spread(_spread(b_scale, 1, b.shape[1]), 0, b.shape[0])
        y = wide_a @ wide_b.T
    else:
        y = (wide_a @ wide_b.T) * a_scale.view(-1, 1) * b_scale.view(1, -1)
    return (y if bias is None else y + bias.float()).to(dtype)


def _spread(scale: Tensor, dim: int, size: int) -> Tensor:
    return scale.repeat_interleave(BLOCK_SCALE, dim).narrow(dim, 0, size)


# The number of tokens is no reason to compile anew: that would happen in the middle of serving.
@triton.jit(do_not_specialize=["M"])
def fp8_gemm_kernel(
    A, A_SCALE, B, B_SCALE, BIAS, Y, M, N, K, a_scale_stride, b_scale_stride,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Scales are applied once, to the sum: a stride of 0 stands for one scale for all rows or columns."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = A + row.to(tl.int64)[:, None] * K + inner[None, :]
    b_at = B + column.to(tl.int64)[None, :] * K + inner[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        a = tl.load(a_at, (row < M)[:, None] & (inner < K - begin)[None, :], 0.0)
        b = tl.load(b_at, (column < N)[None, :] & (inner < K - begin)[:, None], 0.0)
        total = tl.dot(a, b, total, max_num_imprecise_acc=BK)
        a_at += BK
        b_at += BK
    a_scale = tl.load(A_SCALE + row * a_scale_stride, row < M, 0.0)
    b_scale = tl.load(B_SCALE + column * b_scale_stride, column < N, 0.0)
    total = total * a_scale[:, None] * b_scale[None, :]
    if HAS_BIAS:
        total += tl.load(BIAS + column, column < N, 0.0).to(tl.float32)[None, :]
    y_at = Y + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_at, total.to(Y.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def fp8_block_gemm_kernel(
    A, A_SCALE, B, B_SCALE, BIAS, Y, M, N, K,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK is the width of a scale block, and BN divides its height: one b_scale for each step of a program."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    num_blocks = tl.cdiv(K, BK)
    a_at = A + row.to(tl.int64)[:, None] * K + inner[None, :]
    b_at = B + column.to(tl.int64)[None, :] * K + inner[:, None]
    a_scale_at = A_SCALE + row * num_blocks
    b_scale_at = B_SCALE + (tl.program_id(1) * BN // BK) * num_blocks
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        a = tl.load(a_at, (row < M)[:, None] & (inner < K - begin)[None, :], 0.0)
        b = tl.load(b_at, (column < N)[None, :] & (inner < K - begin)[:, None], 0.0)
        scale = tl.load(a_scale_at, row < M, 0.0) * tl.load(b_scale_at)
        total += tl.dot(a, b) * scale[:, None]
        a_at += BK
        b_at += BK
        a_scale_at += 1
        b_scale_at += 1
    if HAS_BIAS:
        total += tl.load(BIAS + column, column < N, 0.0).to(tl.float32)[None, :]
    y_at = Y + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_at, total.to(Y.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


# wgmma and tcgen05 need 64 rows at least, so the narrow tile is 64 high even for one row.
register(
    "fp8_gemm.few_rows",
    any={"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4},
    gfx942={"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 2},
)
register(
    "fp8_gemm.many_rows",
    any={"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 3},
    gfx942={"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 2},
)


def fp8_gemm_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """As `fp8_gemm_ref`; all contiguous."""
    (m, k), n = a.shape, b.shape[0]
    y = torch.empty(m, n, device=a.device, dtype=dtype)
    tile = tiles("fp8_gemm.few_rows" if m <= _FEW_ROWS else "fp8_gemm.many_rows")
    grid = (triton.cdiv(m, tile["BM"]), triton.cdiv(n, tile["BN"]))
    operands = (a, a_scale, b, b_scale, y if bias is None else bias, y, m, n, k)
    if is_block_scaled(b_scale, n):
        fp8_block_gemm_kernel[grid](*operands, HAS_BIAS=bias is not None, **tile)
    else:
        strides = int(a_scale.numel() > 1), int(b_scale.numel() > 1)
        fp8_gemm_kernel[grid](*operands, *strides, HAS_BIAS=bias is not None, **tile)
    return y


def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> Tensor:
    """As `fp8_gemm_ref`, on whatever device the tensors are."""
    return (fp8_gemm_triton if a.is_cuda else fp8_gemm_ref)(a, a_scale, b, b_scale, dtype, bias)


def _specs() -> tuple[KernelSpec, ...]:
    found = []
    for fp8, architectures in (("*fp8e4nv", ("sm_90", "sm_100")), ("*fp8e4b8", ("gfx942",))):
        base = {"A": fp8, "A_SCALE": "*fp32", "B": fp8, "B_SCALE": "*fp32", "BIAS": "*bf16", "Y": "*bf16"}
        base |= {"M": "i32", "N": "i32", "K": "i32"}
        strided = base | {"a_scale_stride": "i32", "b_scale_stride": "i32"}
        for rows in ("few_rows", "many_rows"):
            for form, kernel, types in (("row", fp8_gemm_kernel, strided), ("block", fp8_block_gemm_kernel, base)):
                found += [
                    KernelSpec(
                        f"fp8_gemm.{form}.{rows}{'.bias' if has_bias else ''}", kernel, types, {"HAS_BIAS": has_bias},
                        f"fp8_gemm.{rows}", "fp8", ("A", "B", "BIAS", "Y", "N", "K"), architectures,
                    )
                    for has_bias in (False, True)
                ]  # fmt: skip
        fp16 = {"BIAS": "*fp16", "Y": "*fp16"}
        found += [
            KernelSpec(
                f"fp8_gemm.{form}.{rows}.fp16", kernel, types | fp16, {"HAS_BIAS": False},
                f"fp8_gemm.{rows}", "fp8", ("A", "B", "BIAS", "Y", "N", "K"), architectures,
            )
            for rows in ("few_rows", "many_rows")
            for form, kernel, types in (("row", fp8_gemm_kernel, strided), ("block", fp8_block_gemm_kernel, base))
        ]  # fmt: skip
    return tuple(found)


SPECS = _specs()
