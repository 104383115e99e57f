"""rmsnorm, gated activations and RoPE with the KV write, against their references; bf16 results are bit-equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels.gelu_mul import gelu_mul_ref, gelu_mul_triton
from slipring.kernels.rmsnorm import rmsnorm_ref, rmsnorm_triton
from slipring.kernels.rope import build_cos_sin, inverse_frequencies
from slipring.kernels.rope_store_kv import rope_store_kv_ref, rope_store_kv_triton
from slipring.kernels.silu_mul import silu_mul_ref, silu_mul_triton
from tests.kernels.pairwise import pairwise
from tests.kernels.tolerances import DTYPES, TOLERANCE


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_same(ours: Tensor, expected: Tensor) -> None:
    """bf16 bit for bit; the last bits of fp32 sums and exponentials may differ, and now and then show in fp16."""
    assert ours.dtype == expected.dtype
    if ours.dtype == torch.bfloat16:
        assert torch.equal(ours, expected)
    else:
        assert (ours.double() - expected.double()).abs().max() <= TOLERANCE[ours.dtype]


@pytest.mark.parametrize(
    ("shape", "dtype", "with_residual"), pairwise([(1, 8), (3, 100), (7, 576)], DTYPES, [False, True])
)
def test_rmsnorm(shape: tuple[int, int], dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype)
    residual = normal(*shape, dtype=dtype).flip(0) if with_residual else None
    ours, expected = (f(x, weight, 1e-5, residual) for f in (rmsnorm_triton, rmsnorm_ref))
    assert_same(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


@pytest.mark.parametrize("weight_shape", [(24,), (3, 24)])
def test_rmsnorm_of_each_head_of_a_strided_view(weight_shape: tuple[int, ...]) -> None:
    x, weight = normal(5, 4, 24, dtype=torch.bfloat16)[:, :3], normal(*weight_shape, dtype=torch.bfloat16)
    assert_same(rmsnorm_triton(x, weight, 1e-6)[0], rmsnorm_ref(x, weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 7), (2, 1100)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = normal(shape[0], 2 * shape[1], dtype=dtype) * 3
    assert_same(silu_mul_triton(gate_up), silu_mul_ref(gate_up))


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul(dtype: torch.dtype, tanh: bool) -> None:
    gate_up = normal(3, 2 * 1100, dtype=dtype) * 3
    difference = gelu_mul_triton(gate_up, tanh).double() - gelu_mul_ref(gate_up, tanh).double()
    assert difference.abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [(dtype, dtype) for dtype in DTYPES]
    + [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e4m3fn)],
)
def test_rope_store_kv(dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int) -> None:
    heads, kv_heads, block_size = 6, 2, 4
    table = build_cos_sin(*inverse_frequencies(head_dim, 1e4, None, 64, 64), 64, dtype)
    positions, slots = torch.tensor([0, 9, 63, 5, 2]), torch.tensor([11, 0, -1, 7, 12])
    scales = (0.02, 0.3) if pool_dtype.itemsize == 1 else (1.0, 1.0)  # keys saturate with the first
    results = []
    for run in (rope_store_kv_triton, rope_store_kv_ref):
        qkv = normal(5, heads + 2 * kv_heads, head_dim, dtype=dtype) * 4
        query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
        pools = torch.zeros(2, 4, block_size, kv_heads, head_dim, dtype=pool_dtype)
        run(query, key, value, table, positions, *pools, slots, *scales)
        results.append((qkv, pools.float()))
    for ours, expected in zip(*results, strict=True):
        if dtype == torch.float32:
            assert_same(ours, expected)
        else:
            assert torch.equal(ours, expected)
