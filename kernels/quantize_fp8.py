"""Quantisation to fp8 (e4m3), saturating: one scale for a tensor, for each token, or for each block of 128 columns.

A scale is what the codes are multiplied with: x ~ codes * scale. NVIDIA's e4m3 ends at 448; MI300X has e4m3fnuz,
which ends at 240 (`fp8_dtype`). Codes are `x / scale`, divided exactly, so reference and kernel give the same bytes.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import current_architecture, register, tiles

BLOCK_COLUMNS = 128
"""Width of a block in DeepSeek's form."""
_SMALLEST = 1e-12
"""No scale is computed from a smaller maximum: a row of zeros must not divide by zero."""


@functools.cache
def fp8_dtype() -> torch.dtype:
    """The e4m3 type that this machine's matrix units read."""
    return torch.float8_e4m3fnuz if current_architecture() == "gfx942" else torch.float8_e4m3fn


def quantize_fp8_tensor_ref(
    x: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """x [T, N] -> (codes [T, N], scale [1] float32). With `scale` given (a checkpoint's static one), it is used."""
    if scale is None:
        scale = _scale(x.float().abs().amax().view(1), dtype)
    return _codes(x.float(), scale, dtype), scale


def quantize_fp8_token_ref(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [T, N] -> (codes [T, N], scales [T, 1] float32)."""
    wide = x.float()
    scale = _scale(wide.abs().amax(-1, keepdim=True), dtype)
    return _codes(wide, scale, dtype), scale


def quantize_fp8_block_ref(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [T, N] -> (codes [T, N], scales [T, ceil(N / 128)] float32)."""
    num_tokens, width = x.shape
    num_blocks = -(-width // BLOCK_COLUMNS)
    wide = x.new_zeros(num_tokens, num_blocks * BLOCK_COLUMNS, dtype=torch.float32)
    wide[:, :width] = x
    blocks = wide.view(num_tokens, num_blocks, BLOCK_COLUMNS)
    scale = _scale(blocks.abs().amax(-1), dtype)
    return _codes(blocks, scale.unsqueeze(-1), dtype).view(num_tokens, -1)[:, :width].contiguous(), scale


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp(min=_SMALLEST) / torch.finfo(dtype).max


def _codes(wide: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (wide / scale).clamp(-limit, limit).to(dtype)  # torch's cast alone gives NaN above the limit


@triton.jit
def _store_codes(Y, wide, scale, mask, LARGEST: tl.constexpr):
    codes = tl.div_rn(wide, scale)
    # Not minimum and maximum: those drop NaN, and a row that failed must not pass for a good one.
    codes = tl.where(codes > LARGEST, LARGEST, tl.where(codes < -LARGEST, -LARGEST, codes))
    tl.store(Y, codes.to(Y.dtype.element_ty), mask)


@triton.jit
def largest_kernel(X, LARGEST, numel, BLOCK: tl.constexpr):
    """LARGEST[0] = max(LARGEST[0], |x|) for all of X. A maximum does not depend on the order of the programs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(X + at, at < numel, 0.0).to(tl.float32)
    tl.atomic_max(LARGEST, tl.max(tl.abs(wide), 0))


@triton.jit
def quantize_tensor_kernel(X, SCALE, Y, numel, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(X + at, at < numel, 0.0).to(tl.float32)
    _store_codes(Y + at, wide, tl.load(SCALE), at < numel, LARGEST)


@triton.jit
def quantize_token_kernel(X, Y, SCALE, width, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token: its maximum, then its codes, BLOCK columns at a time."""
    token = tl.program_id(0).to(tl.int64)
    largest = tl.full([BLOCK], SMALLEST, tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        wide = tl.load(X + token * width + column, column < width, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(wide))
    scale = tl.div_rn(tl.max(largest, 0), LARGEST)
    tl.store(SCALE + token, scale)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        wide = tl.load(X + token * width + column, column < width, 0.0).to(tl.float32)
        _store_codes(Y + token * width + column, wide, scale, column < width, LARGEST)


@triton.jit
def quantize_block_kernel(
    X, Y, SCALE, width, num_blocks,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program for BLOCKS neighbouring blocks of a token."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < width
    wide = tl.load(X + token * width + column, inside, 0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), 1), SMALLEST), LARGEST)
    tl.store(SCALE + token * num_blocks + block, scale, block < num_blocks)
    _store_codes(Y + token * width + column, wide, scale[:, None], inside, LARGEST)


register("quantize_fp8.tensor", any={"BLOCK": 4096, "num_warps": 8, "num_stages": 1})
register("quantize_fp8.token", any={"BLOCK": 4096, "num_warps": 8, "num_stages": 1})
register("quantize_fp8.block", any={"BLOCKS": 8, "num_warps": 4, "num_stages": 1})


def quantize_fp8_tensor_triton(
    x: Tensor, scale: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_tensor_ref`; x contiguous."""
    tile = tiles("quantize_fp8.tensor")
    grid = (triton.cdiv(x.numel(), tile["BLOCK"]),)
    if scale is None:
        largest = torch.zeros(1, device=x.device, dtype=torch.float32)
        largest_kernel[grid](x, largest, x.numel(), **tile)
        scale = _scale(largest, dtype)
    codes = torch.empty_like(x, dtype=dtype)
    quantize_tensor_kernel[grid](x, scale, codes, x.numel(), LARGEST=torch.finfo(dtype).max, **tile)
    return codes, scale


def quantize_fp8_token_triton(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_token_ref`; x contiguous."""
    codes = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(x.shape[0], 1, device=x.device, dtype=torch.float32)
    limits = {"SMALLEST": _SMALLEST, "LARGEST": torch.finfo(dtype).max}
    quantize_token_kernel[(x.shape[0],)](x, codes, scale, x.shape[1], **limits, **tiles("quantize_fp8.token"))
    return codes, scale


def quantize_fp8_block_triton(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_block_ref`; x contiguous."""
    num_tokens, width = x.shape
    num_blocks = -(-width // BLOCK_COLUMNS)
    codes = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(num_tokens, num_blocks, device=x.device, dtype=torch.float32)
    limits = {"SMALLEST": _SMALLEST, "LARGEST": torch.finfo(dtype).max, "COLUMNS": BLOCK_COLUMNS}
    tile = tiles("quantize_fp8.block")
    grid = (num_tokens, triton.cdiv(num_blocks, tile["BLOCKS"]))
    quantize_block_kernel[grid](x, codes, scale, width, num_blocks, **limits, **tile)
    return codes, scale


def quantize_fp8_tensor(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_tensor_ref`, in this machine's fp8 type."""
    run = quantize_fp8_tensor_triton if x.is_cuda else quantize_fp8_tensor_ref
    return run(x, scale, fp8_dtype())


def quantize_fp8_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_token_ref`, in this machine's fp8 type."""
    return (quantize_fp8_token_triton if x.is_cuda else quantize_fp8_token_ref)(x, fp8_dtype())


def quantize_fp8_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_fp8_block_ref`, in this machine's fp8 type."""
    return (quantize_fp8_block_triton if x.is_cuda else quantize_fp8_block_ref)(x, fp8_dtype())


def _specs() -> tuple[KernelSpec, ...]:
    found = []
    forms = (("*fp8e4nv", 448.0, ("sm_90", "sm_100")), ("*fp8e4b8", 240.0, ("gfx942",)))
    for dtype, (fp8, largest, architectures) in itertools.product(("bf16", "fp16"), forms):
        suffix = "" if dtype == "bf16" else f".{dtype}"
        common = {"X": f"*{dtype}", "Y": fp8, "SCALE": "*fp32"}
        limits = {"SMALLEST": _SMALLEST, "LARGEST": largest}
        found += [
            KernelSpec(
                f"quantize_fp8.tensor{suffix}", quantize_tensor_kernel, common | {"numel": "i32"}, {"LARGEST": largest},
                "quantize_fp8.tensor", divisible_by_16=("X", "Y"), architectures=architectures,
            ),
            KernelSpec(
                f"quantize_fp8.token{suffix}", quantize_token_kernel, common | {"width": "i32"}, limits,
                "quantize_fp8.token", divisible_by_16=("X", "Y", "width"), architectures=architectures,
            ),
            KernelSpec(
                f"quantize_fp8.block{suffix}", quantize_block_kernel, common | {"width": "i32", "num_blocks": "i32"},
                limits | {"COLUMNS": BLOCK_COLUMNS}, "quantize_fp8.block",
                divisible_by_16=("X", "Y", "width"), architectures=architectures,
            ),
        ]  # fmt: skip
    largest_signature = {"X": "*bf16", "LARGEST": "*fp32", "numel": "i32"}
    found.append(
        KernelSpec(
            "quantize_fp8.largest", largest_kernel, largest_signature, {}, "quantize_fp8.tensor", divisible_by_16=("X",)
        )
    )
    return tuple(found)


SPECS = _specs()
