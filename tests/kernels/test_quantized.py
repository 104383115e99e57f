"""References of the quantised operations against plain definitions, and checkpoints' int4 layouts against ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels.fp8_gemm import fp8_gemm
from slipring.kernels.quantize_fp8 import (
    quantize_fp8_block,
    quantize_fp8_block_ref,
    quantize_fp8_tensor,
    quantize_fp8_tensor_ref,
    quantize_fp8_token,
    quantize_fp8_token_ref,
)
from slipring.kernels.weight_only_gemm import (
    QuantizedWeight,
    dequantize,
    from_awq,
    from_gptq,
    pack_codes,
    unpack_codes,
    weight_only_gemm,
)
from tests.kernels.tolerances import TOLERANCE


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
@pytest.mark.parametrize("form", ["tensor", "token", "block"])
def test_fp8_codes_are_near_and_use_the_whole_range(form: str, fp8: torch.dtype) -> None:
    forms = {"tensor": quantize_fp8_tensor_ref, "token": quantize_fp8_token_ref, "block": quantize_fp8_block_ref}
    x = normal(3, 300) * torch.tensor([[1.0], [100.0], [0.0]])
    codes, scale = forms[form](x, dtype=fp8)
    assert codes.float().abs().max() == torch.finfo(fp8).max
    spread = scale.repeat_interleave(128, 1)[:, :300] if form == "block" else scale
    # Three bits of mantissa: half a step is a sixteenth; below the smallest normal number the step is fixed.
    assert ((codes.float() * spread - x).abs() <= x.abs() / 16 + spread * 2.0**-7).all()
    assert (codes[2].float() == 0).all()


def test_fp8_saturates_with_a_static_scale() -> None:
    codes, _ = quantize_fp8_tensor(torch.tensor([[1e6, -1e6, 2.0]]), torch.tensor([1.0]))
    assert codes.float().tolist() == [[448.0, -448.0, 2.0]]


@pytest.mark.parametrize("form", ["tensor", "row", "block"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 32, 16), (5, 300, 200), (3, 128, 1), (2, 100, 128)])
def test_fp8_gemm_is_the_product_of_what_the_codes_mean(m: int, k: int, n: int, form: str) -> None:
    x, weight = normal(m, k), normal(n, k) / k**0.5
    if form == "block":
        a, a_scale = quantize_fp8_block(x)
        b, b_scale = (weight * 64).to(a.dtype), (normal(-(-n // 128), -(-k // 128)).abs() + 0.5) / 64
        meant_a = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :k]
        meant_b = b.double() * b_scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        quantize = quantize_fp8_tensor if form == "tensor" else quantize_fp8_token
        (a, a_scale), (b, b_scale) = quantize(x), quantize(weight)
        meant_a, meant_b = a.double() * a_scale, b.double() * b_scale
    ours = fp8_gemm(a, a_scale, b, b_scale, torch.float32)
    assert (ours.double() - meant_a @ meant_b.T).abs().max() <= TOLERANCE[torch.float32]


def test_codes_are_unpacked_as_they_were_packed() -> None:
    for bits in (4, 8):
        codes = integers(2**bits, 5, 192)
        assert torch.equal(unpack_codes(pack_codes(codes, bits), bits), codes)
    assert pack_codes(integers(16, 5, 192), 4).shape == (5, 96)


@pytest.mark.parametrize(("bits", "width"), [(3, 64), (4, 96)])
def test_what_cannot_be_packed_is_refused(bits: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"int{bits} with {width} columns"):
        pack_codes(integers(8, 2, width), bits)


def pack_words(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """[R, C] -> int32 [R, C * bits / 32]: element order[i] of a word's run goes to its i-th lowest field."""
    per_word = 32 // bits
    runs = values.long().view(values.shape[0], -1, per_word)
    if order:
        runs = runs[:, :, order]
    words = (runs << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def plainly(q: Tensor, zeros: Tensor, scales: Tensor, group: Tensor) -> Tensor:
    """q [K, N], zeros and scales [G, N], group [K] -> W [N, K] in double precision."""
    return ((q.double() - zeros.double()[group]) * scales.double()[group]).T


def test_awq_becomes_ours() -> None:
    k, n, group_size = 256, 24, 64
    q, zeros = integers(16, k, n), integers(16, k // group_size, n)
    scales = (normal(k // group_size, n).abs() + 0.1).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    weight = from_awq(pack_words(q, 4, order), pack_words(zeros, 4, order), scales)
    assert weight.shape == (n, k) and weight.group_size == group_size
    expected = plainly(q, zeros, scales, torch.arange(k) // group_size)
    assert torch.equal(dequantize(weight, torch.float32).double(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_becomes_ours(bits: int, version: int, symmetric: bool, act_order: bool) -> None:
    k, n, group_size = 256, 24, 32
    q, zeros = integers(2**bits, k, n), integers(2**bits - 1, k // group_size, n) + 1
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = (normal(k // group_size, n).abs() + 0.1).half()
    group = torch.arange(k) // group_size
    if act_order:
        group = group[torch.randperm(k, generator=torch.Generator().manual_seed(1))]
    qweight = pack_words(q.T.contiguous(), bits).T.contiguous()
    qzeros = pack_words(zeros - 1 if version == 1 else zeros, bits)
    weight = from_gptq(qweight, qzeros, scales, bits, group.int(), zeros_less_one=version == 1)
    assert (weight.zeros is None) == symmetric and (weight.order is None) != act_order
    x = normal(3, k)
    expected = x.double() @ plainly(q, zeros, scales, group).T
    assert ((weight_only_gemm(x, weight).double() - expected).abs() <= 2e-5 * expected.abs().max()).all()


def test_a_bias_is_added() -> None:
    weight = QuantizedWeight(pack_codes(integers(256, 6, 64), 8), torch.full((1, 6), 0.01), None, 8, 64)
    x, bias = normal(2, 64), normal(6)
    assert torch.allclose(weight_only_gemm(x, weight, bias), weight_only_gemm(x, weight) + bias)
