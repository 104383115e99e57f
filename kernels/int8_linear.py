"""`y = x W^T` with W as int8 codes and a scale for each row, where a few rows of x meet a weight that must be read.

One token's product takes as long as its weight takes to come from memory, so a quarter of the bytes is most of the
gain: all products of SmolLM2's draft head take 2.5 ms of one Zen 3 core instead of 4.8 (1 row), 4.1 instead of 7.1
(4 rows). The codes are multiplied with bfloat16 (torch's own kernel), which is coarse: for drafts, not for a model
whose tokens are shown. From 16 rows on the packed float32 weight is as fast (10.4 and 10.8 ms), from 32 on faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.linear import linear, pack_weight

_INT8 = torch.ops.aten._weight_int8pack_mm
_FEW_ROWS = 8
_ALIGNED = 16
"""torch's kernel reads past the end of rows of other lengths: wrong numbers, or a crash."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in], twice: for few rows and for many."""

    codes: Tensor
    """[out, in] int8"""
    scale: Tensor
    """[out] bfloat16"""
    wide: Tensor
    """From `pack_weight`, in the dtype of x."""


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> codes [out, in] int8 and scale [out, 1] float32, whose product is the weight, nearly."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().to(torch.int8), scale


def pack_int8(weight: Tensor) -> Int8Weight:
    """[out, in] of the dtype that x will have -> the form that `int8_linear` takes. The argument may be freed."""
    codes, scale = int8_codes(weight)
    return Int8Weight(codes, scale.flatten().bfloat16(), pack_weight(weight))


def int8_linear_ref(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [T, in] -> [T, out] in its dtype."""
    y = x.bfloat16().float() @ weight.codes.float().T
    return (y * weight.scale.float()).bfloat16().to(x.dtype)


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """As `int8_linear_ref` for few rows of a length that torch can do; else as `linear`."""
    if len(x) > _FEW_ROWS or x.shape[1] % _ALIGNED:
        return linear(x, weight.wide)
    return _INT8(x.bfloat16().contiguous(), weight.codes, weight.scale).to(x.dtype)
