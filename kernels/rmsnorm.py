"""Root-mean-square norm (Zhang and Sennrich 2019), arithmetic in fp32, with an optional residual sum before it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def rmsnorm_ref(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., D], weight broadcastable to x ([D], or [heads, D] for a norm of each head).

    Returns (normed, summed): `summed` is x + residual (x itself without one), `normed` its norm times weight. Both
    have x's dtype. The norm is rounded to x's dtype before the weight is applied, as in Hugging Face's LlamaRMSNorm.
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    # One reduction without a squared copy, then one operation for ||x||^2 / D + eps.
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight), summed


@functools.cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@triton.jit
def _rmsnorm_kernel(
    X,
    RESIDUAL,
    WEIGHT,
    NORMED,
    SUMMED,
    stride_token,
    stride_head,
    num_heads,
    weight_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row of `size`; x may be strided over tokens and heads, all else is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    head = row % num_heads
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(X + row // num_heads * stride_token + head * stride_head + at, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        summed = (x + tl.load(RESIDUAL + row * size + at, inside, 0.0).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(SUMMED + row * size + at, summed, inside)
        x = summed.to(tl.float32)  # the norm is of the sum as it is stored
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(WEIGHT + head * weight_stride + at, inside, 0.0).to(tl.float32)
    normed = (x * scale).to(X.dtype.element_ty).to(tl.float32)
    tl.store(NORMED + row * size + at, (normed * weight).to(X.dtype.element_ty), inside)


def rmsnorm_triton(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `rmsnorm_ref`, for x [T, D] or [T, heads, D] with a contiguous last dimension."""
    size = x.shape[-1]
    tokens = x if x.dim() == 3 else x.reshape(-1, 1, size)
    num_heads = tokens.shape[1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(normed)
    constants: dict[str, Any] = {"HAS_RESIDUAL": residual is not None, "BLOCK": triton.next_power_of_2(size)}
    _rmsnorm_kernel[(tokens.shape[0] * num_heads,)](
        tokens,
        x if residual is None else residual.contiguous(),
        weight.contiguous(),
        normed,
        summed,
        tokens.stride(0),
        tokens.stride(1),
        num_heads,
        size if weight.numel() > size else 0,
        size,
        eps,
        **constants,
        **tiles("rmsnorm_heads" if size <= 256 else "rmsnorm"),
    )
    return normed, summed


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `rmsnorm_ref`, on x's device."""
    return (rmsnorm_triton if x.is_cuda else rmsnorm_ref)(x, weight, eps, residual)


register("rmsnorm", any={"num_warps": 8, "num_stages": 1})
register("rmsnorm_heads", any={"num_warps": 1, "num_stages": 1})


def _spec(dtype: str, size: int, has_residual: bool, tile_row: str) -> KernelSpec:
    pointers = ("X", "RESIDUAL", "WEIGHT", "NORMED", "SUMMED")
    sizes = ("stride_token", "stride_head", "num_heads", "weight_stride", "size")
    return KernelSpec(
        name=f"{tile_row}.{dtype}_{size}" + ("_residual" if has_residual else ""),
        kernel=_rmsnorm_kernel,
        signature=dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(sizes, "i32") | {"eps": "fp32"},
        constants={"HAS_RESIDUAL": has_residual, "BLOCK": size},
        tiles=tile_row,
        divisible_by_16=(*pointers, "stride_token", "stride_head", "weight_stride", "size"),
    )


SPECS = (
    _spec("bf16", 4096, True, "rmsnorm"),
    _spec("fp16", 8192, True, "rmsnorm"),
    _spec("bf16", 16384, True, "rmsnorm"),
    _spec("fp32", 8192, False, "rmsnorm"),
    _spec("bf16", 128, False, "rmsnorm_heads"),
    _spec("fp32", 128, False, "rmsnorm_heads"),
)
