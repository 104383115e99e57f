"""fp8 quantisation (byte for byte), fp8 GEMMs and weight-only GEMMs against their references, at irregular shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipring.kernels.fp8_gemm import fp8_gemm_ref, fp8_gemm_triton
from slipring.kernels.quantize_fp8 import (
    quantize_fp8_block_ref,
    quantize_fp8_block_triton,
    quantize_fp8_tensor_ref,
    quantize_fp8_tensor_triton,
    quantize_fp8_token_ref,
    quantize_fp8_token_triton,
)
from slipring.kernels.weight_only_gemm import QuantizedWeight, pack_codes, weight_only_gemm_ref, weight_only_gemm_triton
from tests.kernels.pairwise import pairwise
from tests.kernels.tolerances import DTYPES, TOLERANCE

FORMS = {
    "tensor": (quantize_fp8_tensor_ref, quantize_fp8_tensor_triton),
    "token": (quantize_fp8_token_ref, quantize_fp8_token_triton),
    "block": (quantize_fp8_block_ref, quantize_fp8_block_triton),
}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == expected.dtype
    assert (ours.double() - expected.double()).abs().max() <= TOLERANCE[ours.dtype]


@pytest.mark.parametrize(("shape", "form", "dtype"), pairwise([(1, 16), (3, 300), (2, 4500)], list(FORMS), DTYPES))
def test_quantize_fp8_gives_the_same_bytes(shape: tuple[int, int], form: str, dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype) * 3
    x[0] = 0  # must not divide by zero
    (expected, scale), (ours, our_scale) = (quantize(x) for quantize in FORMS[form])
    assert torch.equal(our_scale, scale)
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


def test_a_static_scale_saturates() -> None:
    x, scale = normal(3, 70) * 100, torch.tensor([0.25])
    (expected, _), (ours, _) = (quantize(x, scale) for quantize in FORMS["tensor"])
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    assert ours.float().abs().max() == torch.finfo(torch.float8_e4m3fn).max


@pytest.mark.parametrize(
    ("shape", "form", "dtype"),
    pairwise(
        [(1, 64, 48), (5, 300, 200), (70, 272, 130)],
        ["tensor", "row", "mixed", "block"],
        [torch.bfloat16, torch.float32],
    ),
)
def test_fp8_gemm(shape: tuple[int, int, int], form: str, dtype: torch.dtype) -> None:
    m, k, n = shape
    x, weight = normal(m, k), normal(n, k) / k**0.5
    if form == "block":
        a, a_scale = quantize_fp8_block_ref(x)
        b = (weight * 64).to(torch.float8_e4m3fn)
        b_scale = (normal(-(-n // 128), -(-k // 128)).abs() + 0.5) / 64
    else:
        a, a_scale = (quantize_fp8_tensor_ref if form == "tensor" else quantize_fp8_token_ref)(x)
        b, b_scale = (quantize_fp8_token_ref if form == "row" else quantize_fp8_tensor_ref)(weight)
    bias = normal(n, dtype=dtype) if form == "row" else None
    assert_close(*(f(a, a_scale, b, b_scale, dtype, bias) for f in (fp8_gemm_triton, fp8_gemm_ref)))


@pytest.mark.parametrize(
    ("shape", "group_size", "bits", "dtype"),
    pairwise([(1, 40), (35, 72), (70, 24)], [32, 64, 128, 192, 384], [4, 8], DTYPES),
)
def test_weight_only_gemm(shape: tuple[int, int], group_size: int, bits: int, dtype: torch.dtype) -> None:
    (m, n), k = shape, 384
    generator = torch.Generator().manual_seed(group_size)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)
    scales = ((normal(k // group_size, n).abs() + 0.5) / (2 ** (bits - 2) * k**0.5)).to(dtype)
    extras = group_size in (64, 128)
    zeros = torch.randint(0, 2**bits, scales.shape, generator=generator, dtype=torch.uint8) if extras else None
    order = torch.randperm(k, generator=generator) if extras else None
    weight = QuantizedWeight(pack_codes(codes, bits), scales, zeros, bits, group_size, order)
    x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype) if extras else None
    assert_close(*(f(x, weight, bias) for f in (weight_only_gemm_triton, weight_only_gemm_ref)))


@pytest.mark.parametrize("quantize", [quantize_fp8_tensor_triton, quantize_fp8_token_triton, quantize_fp8_block_triton])
def test_what_is_not_finite_stays_so_and_harms_no_other_row(quantize: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Or a row that failed would go on with numbers that look right."""
    x = torch.randn((3, 200), generator=torch.Generator().manual_seed(1))
    x[1, 150] = float("nan")
    codes, _ = quantize(x)
    assert codes[1, 150].float().isnan() and codes[0].float().isfinite().all() and codes[2].float().isfinite().all()
