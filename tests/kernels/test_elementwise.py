"""The kernels of a layer, one by one, against plain double-precision formulas, at irregular shapes."""

from __future__ import annotations

import pytest
import torch

from slipring.kernels.int8_linear import int8_linear, int8_linear_ref, pack_int8
from slipring.kernels.linear import linear, pack_weight
from slipring.kernels.rmsnorm import rmsnorm
from slipring.kernels.rope import build_cos_sin, inverse_frequencies, rope
from slipring.kernels.silu_mul import silu_mul
from slipring.kernels.store_kv import store_kv
from tests.kernels.tolerances import DTYPES, TOLERANCE

SHAPES = [(1, 8), (3, 7), (5, 576), (33, 100)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert (ours.double() - expected.double()).abs().max() <= TOLERANCE[ours.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rmsnorm(shape: tuple[int, int], dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype)
    residual = normal(*shape, dtype=dtype) / 2 if with_residual else None
    normed, summed = rmsnorm(x, weight, 1e-5, residual)
    assert torch.equal(summed, x if residual is None else x + residual)
    wide = summed.double()
    assert_close(normed, wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double())


def test_rmsnorm_of_each_head() -> None:
    x, weight = normal(5, 3, 16), normal(3, 16)
    normed, _ = rmsnorm(x, weight, 1e-6)
    for head in range(3):
        assert_close(normed[:, head], rmsnorm(x[:, head], weight[head], 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = normal(shape[0], 2 * shape[1], dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    assert_close(silu_mul(x), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8, 16), (5, 7, 33), (70, 65, 48)])
@pytest.mark.parametrize("extras", [False, True])
def test_linear(shape: tuple[int, int, int], dtype: torch.dtype, extras: bool) -> None:
    num_tokens, in_features, out_features = shape
    x = normal(num_tokens, in_features, dtype=dtype)
    weight = normal(out_features, in_features, dtype=dtype) / in_features**0.5
    bias = normal(out_features, dtype=dtype) if extras else None
    residual = normal(num_tokens, out_features, dtype=dtype) if extras else None
    kept = None if residual is None else residual.clone()
    expected = x.double() @ weight.double().T
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    assert_close(linear(x, pack_weight(weight), bias, residual), expected)
    assert kept is None or torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 64, 96), (3, 80, 33), (8, 576, 64), (9, 576, 64), (1, 17, 5), (4, 17, 5), (4, 36, 9), (4, 100, 9)]
)
def test_int8_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_tokens, in_features, out_features = shape
    x = normal(num_tokens, in_features, dtype=dtype)
    weight = normal(out_features, in_features, dtype=dtype) / in_features**0.5
    packed = pack_int8(weight)
    y, exact = int8_linear(x, packed), x.double() @ weight.double().T
    assert y.dtype == dtype
    if num_tokens > 8 or in_features % 16:
        assert_close(y, exact)
        return
    assert (y.double() - int8_linear_ref(x, packed).double()).abs().max() <= 2**-6
    assert (y.double() - exact).abs().max() <= 0.04, "codes and bfloat16 round"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_turns_pairs_by_position(dtype: torch.dtype) -> None:
    inv_freq, factor = inverse_frequencies(16, 10000.0, None, 64, 64)
    table = build_cos_sin(inv_freq, factor, 64, dtype)
    positions = torch.tensor([0, 1, 5, 63])
    x = normal(4, 3, 16, dtype=dtype)
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    ours = rope(x, cos, sin)
    angle = positions[:, None, None].double() * inv_freq.double()
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(torch.ones_like(angle), angle)
    assert_close(ours, torch.cat((turned.real, turned.imag), -1))
    assert torch.equal(ours[0], x[0])


def test_an_unknown_rope_type_is_refused() -> None:
    with pytest.raises(ValueError, match="spiral"):
        inverse_frequencies(16, 1e4, {"rope_type": "spiral", "factor": 2.0}, 64, 64)


@pytest.mark.parametrize("rope_type", ["dynamic", "yarn", "llama3", "linear"])
def test_frequencies_equal_those_of_transformers(rope_type: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": rope_type, "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 2048}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(scaling)
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=6000)
    ours, factor = inverse_frequencies(64, 5e5, scaling, 2048, 6000)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    assert factor == pytest.approx(expected_factor)


def test_store_kv_writes_slots_and_nothing_else() -> None:
    keys, values = torch.zeros(4, 8, 2, 6), torch.zeros(4, 8, 2, 6)
    slots = torch.tensor([31, 0, 9])
    qkv = normal(3, 6, 6)
    store_kv(qkv[:, :2], qkv[:, 2:4], keys, values, slots)  # as in a model: strided views
    assert torch.equal(keys.view(32, 2, 6)[slots], qkv[:, :2])
    assert torch.equal(values.view(32, 2, 6)[slots], qkv[:, 2:4])
    assert keys.count_nonzero() == values.count_nonzero() == 3 * 2 * 6
