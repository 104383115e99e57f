"""Rotary position embedding, neox style: dimension i turns together with dimension i + D/2 (Su et al. 2021).

`inverse_frequencies` follows Hugging Face's `modeling_rope_utils` for rope types default, linear, dynamic, llama3
and yarn. Angles are computed in fp32 whatever the compute dtype. The cached sine has its first half negated, so
that rotation is `x * cos + swap_halves(x) * sin`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: dict[str, Any] | None,
    max_position_embeddings: int,
    max_model_len: int,
) -> tuple[Tensor, float]:
    """([head_dim / 2] float32, factor on cosine and sine). Raises ValueError for an unknown rope type."""
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = scaling or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type in ("default", None):
        return inv_freq, 1.0
    if rope_type == "linear":
        return inv_freq / scaling["factor"], 1.0
    if rope_type == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if rope_type == "yarn":
        return _yarn(head_dim, theta, inv_freq, scaling, max_position_embeddings)
    if rope_type == "dynamic":
        return _dynamic(head_dim, theta, scaling, max_position_embeddings, max_model_len), 1.0
    if rope_type == "factors":  # a GGUF's rope_freqs tensor: one divisor for each frequency
        return inv_freq / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    raise ValueError(f"rope type {rope_type!r} is not supported (default, factors, linear, dynamic, llama3, yarn are)")


def build_cos_sin(inv_freq: Tensor, factor: float, num_positions: int, dtype: torch.dtype) -> Tensor:
    """[num_positions, 2, head_dim]: cosine, then sine with its first half negated, ready for `rope`."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


def rope_ref(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]; cos, sin [T, 1, D] gathered from `build_cos_sin` by position -> [T, heads, D]."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return torch.addcmul(x * cos, swapped, sin)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rope_ref`, for the CPU; a GPU's steps go by `rope_store_kv.py`."""
    return rope_ref(x, cos, sin)


def _llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths_per_context = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    smooth = ((wavelengths_per_context - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * (1 - smooth) + inv_freq * smooth


def _dynamic(head_dim: int, theta: float, scaling: dict[str, Any], trained: int, max_model_len: int) -> Tensor:
    """NTK scaling for the longest sequence that this engine admits: one base for all keys, so caches stay valid."""
    factor = scaling["factor"]
    length = max(max_model_len, trained)
    stretched = theta * ((factor * length / trained) - (factor - 1)) ** (head_dim / (head_dim - 2))
    return stretched ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _yarn(
    head_dim: int, theta: float, inv_freq: Tensor, scaling: dict[str, Any], max_position_embeddings: int
) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, ramp between, warm the softmax."""
    trained = scaling.get("original_max_position_embeddings") or max_position_embeddings
    factor = scaling["factor"]
    low = _yarn_dimension(scaling.get("beta_fast") or 32, head_dim, theta, trained)
    high = _yarn_dimension(scaling.get("beta_slow") or 1, head_dim, theta, trained)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return inv_freq / factor * interpolated + inv_freq * (1 - interpolated), _yarn_attention_factor(factor, scaling)


def _yarn_dimension(num_rotations: float, head_dim: int, theta: float, trained: int) -> float:
    return head_dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
