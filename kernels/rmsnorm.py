"""Root-mean-square norm (Zhang and Sennrich 2019), arithmetic in fp32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


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


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `rmsnorm_ref`. Dispatch point: every device runs the reference so far."""
    return rmsnorm_ref(x, weight, eps, residual)
