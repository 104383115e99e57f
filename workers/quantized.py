"""Quantised linear layers of safetensors checkpoints: read, dequantised, or kept as they are for the GPU's kernels.

A *part* is one weight [N, K] of the checkpoint in our layout: `Fp8Weight` or `kernels.weight_only_gemm`'s
`QuantizedWeight`. `read_part` makes it out of the stored tensors of any supported format; `dequantize_part` is the
exact reference. On the CPU the loader dequantises every part at load into the compute dtype: the model then takes the
memory of an unquantised one, and its activations are not quantised. On a GPU a `QuantizedLinear` keeps the parts, and
fp8 quantises activations too, as the checkpoint's authors measured it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipring.kernels.fp8_gemm import BLOCK_SCALE, fp8_gemm
from slipring.kernels.quantize_fp8 import fp8_dtype, quantize_fp8_block, quantize_fp8_token
from slipring.kernels.weight_only_gemm import QuantizedWeight, dequantize, from_awq, from_gptq, weight_only_gemm
from slipring.shm.spec import QuantizationSpec


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [N, K]: codes * scale."""

    codes: Tensor
    """e4m3 [N, K]."""
    scale: Tensor
    """float32: [1] or [N, 1], or for blocks [ceil(N / 128), ceil(K / 128)]."""
    in_blocks: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


Part = Fp8Weight | QuantizedWeight
ReadFn = Callable[[str], Tensor]
"""The stored tensor of a name, on the CPU; raises what the loader raises when it is missing."""

MARKS = {"fp8": "weight_scale", "fp8_block": "weight_scale_inv", "awq": "qweight", "gptq": "qweight"}
"""Method -> the tensor whose presence beside `X.` says that the linear layer X is quantised."""


def read_part(spec: QuantizationSpec, module: str, read: ReadFn, has: Callable[[str], bool]) -> Part:
    """The part of `module` (a name without `.weight`), on the CPU. Raises ValueError when its tensors do not match."""
    if spec.method in ("fp8", "fp8_block"):
        codes, scale = read(f"{module}.weight"), read(f"{module}.{MARKS[spec.method]}").float()
        return _fp8_part(codes, scale, spec.method == "fp8_block")
    qweight, qzeros, scales = (read(f"{module}.{name}") for name in ("qweight", "qzeros", "scales"))
    per_word = 32 // spec.bits
    num_columns = qweight.shape[0] * (1 if spec.method == "awq" else per_word)
    groups = 1 if spec.group_size == -1 else num_columns / spec.group_size
    if scales.shape[0] != groups or qzeros.shape != (groups, scales.shape[1] // per_word):
        raise ValueError(f"scales {list(scales.shape)} and zeros {list(qzeros.shape)} do not fit {num_columns} columns")
    if spec.method == "awq":
        return from_awq(qweight, qzeros, scales)
    g_idx = read(f"{module}.g_idx") if has(f"{module}.g_idx") else None
    return from_gptq(qweight, qzeros, scales, spec.bits, g_idx, spec.zeros_less_one)


def _fp8_part(codes: Tensor, scale: Tensor, in_blocks: bool) -> Fp8Weight:
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        raise ValueError(f"{codes.dtype} {list(codes.shape)} where an e4m3 matrix was expected")
    num_rows, num_columns = codes.shape
    if in_blocks:
        fits = scale.shape == (-(-num_rows // BLOCK_SCALE), -(-num_columns // BLOCK_SCALE))
    else:
        fits = scale.numel() in (1, num_rows)
        scale = scale.view(1) if scale.numel() == 1 else scale.view(-1, 1)
    if not fits:
        raise ValueError(f"scales {list(scale.shape)} do not fit {num_rows} x {num_columns}")
    return Fp8Weight(codes, scale.contiguous(), in_blocks)


def dequantize_part(part: Part, out: Tensor) -> None:
    """part [N, K] -> out [N, K] of any float dtype; the product is made in fp32 and rounded once."""
    if isinstance(part, QuantizedWeight):
        wide = dequantize(part, torch.float32)
        if part.order is None:
            out.copy_(wide)
        else:
            out[:, part.order] = wide.to(out.dtype)
        return
    scale = part.scale
    if part.in_blocks:
        scale = scale.repeat_interleave(BLOCK_SCALE, 0)[: out.shape[0]]
        scale = scale.repeat_interleave(BLOCK_SCALE, 1)[:, : out.shape[1]]
    out.copy_(part.codes.float().mul_(scale))


def fuse(parts: Sequence[Part]) -> list[Part]:
    """Parts stacked by rows: as one where that needs no change of any number, else as they are."""
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    integer = [part for part in parts if isinstance(part, QuantizedWeight)]
    fused = None
    if len(fp8) == len(parts):
        fused = _fuse_fp8(fp8)
    elif len(integer) == len(parts):
        fused = _fuse_integer(integer)
    return list(parts) if fused is None else [fused]


def _fuse_fp8(parts: list[Fp8Weight]) -> Fp8Weight | None:
    if len({part.in_blocks for part in parts}) > 1:
        return None
    in_blocks = parts[0].in_blocks
    if in_blocks and any(part.shape[0] % BLOCK_SCALE for part in parts[:-1]):
        return None  # the next part would begin within a block
    scales = [part.scale if in_blocks else part.scale.expand(part.shape[0], 1) for part in parts]
    # Bytes, because torch joins no fp8 tensors on the CPU.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype)
    return Fp8Weight(codes, torch.cat(scales), in_blocks)


def _fuse_integer(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    if len(parts) == 1:
        return parts[0]
    # Columns in an order of their own (GPTQ's act-order) are hardly ever the same for two parts.
    alike = {(part.bits, part.group_size, part.scales.dtype) for part in parts}
    if len(alike) > 1 or any(part.order is not None for part in parts):
        return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts], 1)
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts], 1)
    return QuantizedWeight(codes, scales, zeros, parts[0].bits, parts[0].group_size)


def _zeros(part: QuantizedWeight) -> Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full(part.scales.shape, 2 ** (part.bits - 1), dtype=torch.uint8, device=part.scales.device)


class QuantizedLinear:
    """`y = x W^T` with W in parts, on their device; what `kernels.linear` is for ordinary weights."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts = [_placed(part, device) for part in fuse(parts)]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def forward(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, K] contiguous, bias [N], residual [T, N] -> [T, N] of x's dtype."""
        sizes = [part.shape[0] for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        products = [_product(x, part, own) for part, own in zip(self.parts, biases, strict=True)]
        y = products[0] if len(products) == 1 else torch.cat(products, 1)
        return y if residual is None else y.add_(residual)


def _product(x: Tensor, part: Part, bias: Tensor | None) -> Tensor:
    if isinstance(part, QuantizedWeight):
        return weight_only_gemm(x, part, bias)
    a, a_scale = (quantize_fp8_block if part.in_blocks else quantize_fp8_token)(x)
    return fp8_gemm(a, a_scale, part.codes, part.scale, x.dtype, bias)


def _placed(part: Part, device: torch.device) -> Part:
    if isinstance(part, Fp8Weight):
        part = machine_fp8(part, fp8_dtype())
        return replace(part, codes=part.codes.to(device), scale=part.scale.to(device))
    zeros, order = (None if x is None else x.to(device) for x in (part.zeros, part.order))
    return replace(part, codes=part.codes.to(device), scales=part.scales.to(device), zeros=zeros, order=order)


def machine_fp8(part: Fp8Weight, dtype: torch.dtype) -> Fp8Weight:
    """The same numbers in the e4m3 of the machine: MI300X's e4m3fnuz reads e4m3fn's bits as half, and -0 as NaN."""
    if part.codes.dtype == dtype:
        return part
    bits = part.codes.view(torch.int8)
    bits = torch.where(bits == -128, torch.zeros_like(bits), bits)
    return Fp8Weight(bits.view(dtype), part.scale * 2, part.in_blocks)
