"""The references that the paged GPU kernels are held to, against the CPU worker's attention and plain formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.gelu_mul import gelu_mul
from slipring.kernels.paged_attention import AttentionPlan, Chunk, DecodeGroup, chunk_mask, paged_attention
from slipring.kernels.paged_decode import paged_decode
from slipring.kernels.paged_kv import AttentionOptions
from slipring.kernels.paged_prefill import paged_prefill
from slipring.kernels.rope import build_cos_sin, inverse_frequencies, rope
from slipring.kernels.rope_store_kv import rope_store_kv
from slipring.kernels.store_kv import store_kv
from tests.kernels.tolerances import ATTENTION_TOLERANCE

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 8, 4
BLOCKS = torch.tensor([[0, 0, 0], [5, 2, 3]], dtype=torch.int32)
"""Block table; row 1 has 11 positions."""
OPTIONS = AttentionOptions(scale=HEAD_DIM**-0.5)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [11, H, D], key and value [11, KVH, D] of row 1, and pools that hold them."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(11, HEADS, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 11, KV_HEADS, HEAD_DIM, generator=generator)
    pools = torch.zeros(2, 6, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    place = torch.arange(11)
    store_kv(key, value, *pools, BLOCKS[1][place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE)
    return query, key, value, pools


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert (ours.flatten(1) - expected.flatten(1)).abs().max() <= ATTENTION_TOLERANCE[torch.float32]


def test_decode_and_chunk_are_those_of_the_cpu_worker() -> None:
    query, key, value, pools = tensors()
    mask = torch.zeros(1, 1, 1, 12).index_fill_(3, torch.tensor(11), -torch.inf)
    group = DecodeGroup(0, 1, 1, BLOCKS[1].long(), mask)
    plan = AttentionPlan(torch.empty(0, dtype=torch.int64), [group], [])
    expected = paged_attention(query[10:], key[10:], value[10:], *pools, plan, OPTIONS.scale)
    assert_close(paged_decode(query[10:], *pools, BLOCKS, ints(1), ints(11), OPTIONS), expected)

    chunk = Chunk(0, 6, 11, BLOCKS[1].long(), chunk_mask(5, 6, torch.float32))
    plan = AttentionPlan(torch.empty(0, dtype=torch.int64), [], [chunk])
    expected = paged_attention(query[5:], key[5:], value[5:], *pools, plan, OPTIONS.scale)
    ours = paged_prefill(query[5:], *pools, BLOCKS, ints(1), ints(0, 6), ints(5), 6, OPTIONS)
    assert_close(ours, expected)
    chain = (2 ** (torch.arange(6) + 1) - 1, torch.arange(5, 11))
    assert_close(paged_prefill(query[5:], *pools, BLOCKS, ints(1), ints(0, 6), ints(5), 6, OPTIONS, chain), expected)


def test_a_window_and_a_soft_cap_are_gemmas() -> None:
    query, key, value, pools = tensors()
    options = AttentionOptions(OPTIONS.scale, window=3, soft_cap=0.5)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * options.scale
    scores = torch.tanh(scores / 0.5) * 0.5
    ago = torch.arange(11)[:, None] - torch.arange(11)
    weights = scores.masked_fill((ago < 0) | (ago >= 3), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1))
    assert_close(paged_prefill(query, *pools, BLOCKS, ints(1), ints(0, 11), ints(0), 11, options), expected)
    assert_close(paged_decode(query[10:], *pools, BLOCKS, ints(1), ints(11), options), expected[10:])


def test_rope_store_kv_is_rope_and_store_kv() -> None:
    query, key, value, _ = tensors()
    table = build_cos_sin(*inverse_frequencies(HEAD_DIM, 1e4, None, 64, 64), 64, torch.float32)
    positions, slots = torch.arange(30, 41), torch.arange(11).flip(0)
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    pools, expected = torch.zeros(2, 2, 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    store_kv(rope(key, cos, sin), value, *expected, slots)
    turned = rope(query, cos, sin)
    rope_store_kv(query, key, value, table, positions, *pools, slots)
    assert torch.equal(query, turned) and torch.equal(pools, expected)


def test_gelu_mul() -> None:
    gate, up = torch.linspace(-4, 4, 9).double(), torch.linspace(1, 2, 9).double()
    exact = gelu_mul(torch.cat((gate, up))[None], tanh=False)[0]
    torch.testing.assert_close(exact, gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up)
    close = gelu_mul(torch.cat((gate, up))[None], tanh=True)[0]
    assert 0 < (close - exact).abs().max() < 1e-3
