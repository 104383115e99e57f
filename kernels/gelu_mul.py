"""The gated activation of the Gemma family's MLP: `gelu(gate) * up` (Shazeer 2020, GeGLU), tanh or erf form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def gelu_mul_ref(gate_up: Tensor, tanh: bool) -> Tensor:
    """gate_up [T, 2 I], the gate's columns first -> [T, I], contiguous, same dtype.

    `tanh` picks the approximation (Hendrycks and Gimpel 2016; Hugging Face's gelu_pytorch_tanh) over the exact form.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)


@triton.jit
def _gelu_mul_kernel(GATE_UP, OUT, stride_token, size, TANH: tl.constexpr, BLOCK: tl.constexpr):
    """grid [T, cdiv(size, BLOCK)]"""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(GATE_UP + token * stride_token + at, inside, 0.0).to(tl.float32)
    up = tl.load(GATE_UP + token * stride_token + size + at, inside, 0.0).to(tl.float32)
    if TANH:
        # 0.5 (1 + tanh(u)) is sigmoid(2 u), which loses nothing where tanh is near -1; 2 sqrt(2 / pi) = 1.59577.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-inner))
    else:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    activated = activated.to(OUT.dtype.element_ty).to(tl.float32)  # rounded before the product, as the reference does
    tl.store(OUT + token * size + at, (activated * up).to(OUT.dtype.element_ty), inside)


def gelu_mul_triton(gate_up: Tensor, tanh: bool) -> Tensor:
    """As `gelu_mul_ref`; rows may be strided."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    tile: dict[str, Any] = {"TANH": tanh} | tiles("gelu_mul")
    grid = (num_tokens, triton.cdiv(size, tile["BLOCK"]))
    _gelu_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, **tile)
    return out


def gelu_mul(gate_up: Tensor, tanh: bool) -> Tensor:
    """As `gelu_mul_ref`, on gate_up's device."""
    return (gelu_mul_triton if gate_up.is_cuda else gelu_mul_ref)(gate_up, tanh)


register("gelu_mul", any={"BLOCK": 1024, "num_warps": 4, "num_stages": 1})

SPECS = tuple(
    KernelSpec(
        name=f"gelu_mul.{dtype}_{'tanh' if tanh else 'erf'}",
        kernel=_gelu_mul_kernel,
        signature={"GATE_UP": f"*{dtype}", "OUT": f"*{dtype}", "stride_token": "i32", "size": "i32"},
        constants={"TANH": tanh},
        tiles="gelu_mul",
        divisible_by_16=("GATE_UP", "OUT", "stride_token", "size"),
    )
    for dtype, tanh in (("bf16", True), ("fp16", True), ("bf16", False))
)
