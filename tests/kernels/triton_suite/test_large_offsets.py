"""Offsets past 2^31 elements: pools and weights as large as a server's, of which only the pages in use exist."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels import block_copy, moe_gemm, rope_store_kv
from slipring.kernels.moe_route import SortedSlots
from slipring.kernels.paged_decode import paged_decode_ref, paged_decode_triton
from slipring.kernels.paged_kv import AttentionOptions
from slipring.kernels.paged_prefill import paged_prefill_ref, paged_prefill_triton
from slipring.kernels.rope import build_cos_sin, inverse_frequencies
from tests.kernels.memcheck import overflows
from tests.kernels.tolerances import ATTENTION_TOLERANCE, TOLERANCE

BLOCK_SIZE, KV_HEADS, HEAD_DIM = 16, 8, 64
FAR = 2**31 // (BLOCK_SIZE * KV_HEADS * HEAD_DIM)
"""The first block whose elements do not fit 32 bits."""
BLOCKS = [FAR + 1, 3, FAR - 1, FAR]
BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.fixture(scope="module")
def pools() -> list[Tensor]:
    """Keys and values, 4 GiB each, all but `BLOCKS` never touched."""
    made = []
    for seed in range(2):
        pool = torch.empty((FAR + 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype=BF16)
        for i, block in enumerate(BLOCKS):
            pool[block] = normal(BLOCK_SIZE, KV_HEADS, HEAD_DIM, seed=10 * seed + i)
        made.append(pool)
    return made


def close(ours: Tensor, expected: Tensor, tolerance: float) -> bool:
    return (ours.float() - expected.float()).abs().max().item() <= tolerance


def test_attention_reads_far_blocks(pools: list[Tensor]) -> None:
    table, rows = torch.tensor([BLOCKS], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    length, options = 4 * BLOCK_SIZE - 3, AttentionOptions(HEAD_DIM**-0.5)
    decode = (normal(1, KV_HEADS, HEAD_DIM), *pools, table, rows, torch.tensor([length]).int(), options, 1)
    bounds, starts = torch.tensor([0, 2]).int(), torch.tensor([length - 2]).int()
    prefill = (normal(2, KV_HEADS, HEAD_DIM), *pools, table, rows, bounds, starts, 2, options)
    with overflows():
        ours = paged_decode_triton(*decode), paged_prefill_triton(*prefill)
    assert close(ours[0], paged_decode_ref(*decode), ATTENTION_TOLERANCE[BF16])
    assert close(ours[1], paged_prefill_ref(*prefill), ATTENTION_TOLERANCE[BF16])


def test_keys_and_values_go_to_far_slots(pools: list[Tensor]) -> None:
    slots = torch.tensor([FAR * BLOCK_SIZE + 5, 3 * BLOCK_SIZE + 15])
    table = build_cos_sin(*inverse_frequencies(HEAD_DIM, 1e4, None, 64, 64), 64, BF16)
    heads = [normal(2, KV_HEADS, HEAD_DIM, seed=i) for i in range(3)]
    positions = torch.tensor([7, 40])
    with overflows():
        rope_store_kv.rope_store_kv_triton(*(x.clone() for x in heads), table, positions, *pools, slots)
    found = [pool.view(-1, KV_HEADS, HEAD_DIM)[slots] for pool in pools]
    small = [torch.zeros(1, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=BF16) for _ in range(2)]
    rope_store_kv.rope_store_kv_ref(*heads, table, positions, *small, torch.tensor([0, 1]))
    assert all(torch.equal(ours, expected[0, :2]) for ours, expected in zip(found, small, strict=True))


def test_far_blocks_are_copied(pools: list[Tensor]) -> None:
    pool, staging = pools[0].unsqueeze(0), torch.empty((2, 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM), dtype=BF16)
    expected = pools[0][BLOCKS[:2]].clone()
    with overflows():
        block_copy.gather_blocks_triton(pool, torch.tensor(BLOCKS[:2]).int(), staging)
        block_copy.copy_blocks_triton(pool, torch.tensor([3]).int(), torch.tensor([FAR - 2]).int())
    assert torch.equal(staging[:, 0], expected) and torch.equal(pools[0][FAR - 2], expected[1])


def test_the_last_of_many_experts_multiplies() -> None:
    n, k, num_experts = 128, 64, 2**31 // (128 * 64) + 2
    weight = torch.empty((num_experts, n, k), dtype=BF16)
    weight[-1] = normal(n, k)
    slots = torch.full((16,), 4, dtype=torch.int32)
    slots[:4] = torch.arange(4)
    placed = SortedSlots(slots, torch.tensor([num_experts - 1]).int(), torch.tensor([16]).int(), 16)
    with overflows():
        ours = moe_gemm.moe_gemm_triton(normal(4, k), weight, placed, 4, None)
    assert close(ours / k**0.5, normal(4, k).float() @ weight[-1].float().T / k**0.5, TOLERANCE[BF16])
