"""The gated activation of the Llama family's MLP: `silu(gate) * up` (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], the gate's columns first -> [T, I], contiguous, same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _silu_mul_kernel(GATE_UP, OUT, stride_token, size, BLOCK: tl.constexpr):
    """grid [T, cdiv(size, BLOCK)]"""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(GATE_UP + token * stride_token + at, inside, 0.0).to(tl.float32)
    up = tl.load(GATE_UP + token * stride_token + size + at, inside, 0.0).to(tl.float32)
    # Rounded before the product, as the reference and Hugging Face do.
    activated = (gate / (1.0 + tl.exp(-gate))).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + token * size + at, (activated * up).to(OUT.dtype.element_ty), inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """As `silu_mul_ref`; rows may be strided."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    tile = tiles("silu_mul")
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, tile["BLOCK"]))](gate_up, out, gate_up.stride(0), size, **tile)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `silu_mul_ref`, on gate_up's device."""
    return (silu_mul_triton if gate_up.is_cuda else silu_mul_ref)(gate_up)


register("silu_mul", any={"BLOCK": 1024, "num_warps": 4, "num_stages": 1})

SPECS = tuple(
    KernelSpec(
        name=f"silu_mul.{dtype}",
        kernel=_silu_mul_kernel,
        signature={"GATE_UP": f"*{dtype}", "OUT": f"*{dtype}", "stride_token": "i32", "size": "i32"},
        tiles="silu_mul",
        divisible_by_16=("GATE_UP", "OUT", "stride_token", "size"),
    )
    for dtype in ("bf16", "fp16", "fp32")
)
