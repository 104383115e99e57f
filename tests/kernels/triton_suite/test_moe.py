"""Routing, sorting by expert and the grouped GEMM against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels.moe_gemm import moe_gemm_ref, moe_gemm_triton
from slipring.kernels.moe_route import route_topk_ref, route_topk_triton, sort_by_expert_ref, sort_by_expert_triton
from tests.kernels.pairwise import pairwise
from tests.kernels.tolerances import DTYPES, TOLERANCE


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(
    ("shape", "renormalize", "dtype"),
    pairwise([(1, 8, 2), (9, 60, 4), (5, 3, 3), (6, 128, 6)], [False, True], DTYPES),
)
def test_route_topk(shape: tuple[int, int, int], renormalize: bool, dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k = shape
    logits = normal(num_tokens, num_experts, dtype=dtype)
    logits[0] = 1  # ties go to the lower expert
    weights, experts = route_topk_ref(logits, top_k, renormalize)
    our_weights, our_experts = route_topk_triton(logits, top_k, renormalize)
    assert torch.equal(our_experts, experts)
    assert (our_weights - weights).abs().max() <= TOLERANCE[torch.float32]


def some_experts(num_tokens: int, num_experts: int, top_k: int, absent: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int()
    return experts.masked_fill(experts % 3 == 1, -1) if absent else experts


@pytest.mark.parametrize(
    ("shape", "tile_rows", "absent"), pairwise([(1, 8, 2), (50, 6, 3), (7, 130, 8)], [16, 64], [False, True])
)
def test_sort_by_expert(shape: tuple[int, int, int], tile_rows: int, absent: bool) -> None:
    num_tokens, num_experts, top_k = shape
    experts = some_experts(num_tokens, num_experts, top_k, absent)
    expected, ours = (sort(experts, num_experts, tile_rows) for sort in (sort_by_expert_ref, sort_by_expert_triton))
    assert torch.equal(ours.num_rows, expected.num_rows)
    assert torch.equal(ours.slots, expected.slots)
    num_tiles = int(expected.num_rows) // tile_rows
    assert torch.equal(ours.tile_expert[:num_tiles], expected.tile_expert[:num_tiles])


@pytest.mark.parametrize(
    ("absent", "second", "tile_rows", "dtype"), pairwise([False, True], [False, True], [16, 64, 128], DTYPES)
)
def test_moe_gemm(absent: bool, second: bool, tile_rows: int, dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k, n, k = 20, 5, 2, 72, 200
    slots = sort_by_expert_ref(some_experts(num_tokens, num_experts, top_k, absent), num_experts, tile_rows)
    num_slots = num_tokens * top_k
    x = normal(num_slots if second else num_tokens, k, dtype=dtype)
    weight = normal(num_experts, n, k, dtype=dtype) / k**0.5
    router = normal(num_slots).sigmoid() if second else None
    ours, expected = (gemm(x, weight, slots, num_slots, router) for gemm in (moe_gemm_triton, moe_gemm_ref))
    assert (ours.double() - expected.double()).abs().max() <= TOLERANCE[dtype]


def test_a_token_without_finite_logits_gets_experts_that_exist() -> None:
    """60 experts in a block of 64: an index past them would read what is nobody's weight."""
    logits = normal(5, 60)
    logits[1, 7], logits[3, 2] = float("nan"), float("inf")
    weights, experts = route_topk_triton(logits, 4, True)
    expected_weights, expected = route_topk_ref(logits, 4, True)
    assert experts.min() >= 0 and experts.max() < 60
    assert all(len(set(row)) == 4 for row in experts.tolist())
    assert torch.equal(experts[::2], expected[::2]) and weights[::2].isfinite().all()
    assert weights[1].isnan().all() and weights[3].isnan().all() and expected_weights[1].isnan().all()


def test_a_step_of_padding_alone() -> None:
    """Every expert is -1: nothing is sorted in, and the product is zero."""
    experts = torch.full((3, 2), -1, dtype=torch.int32)
    ours, expected = (sort(experts, 5, 16) for sort in (sort_by_expert_triton, sort_by_expert_ref))
    assert ours.num_rows.tolist() == expected.num_rows.tolist() == [0]
    assert torch.equal(ours.slots, expected.slots) and (ours.slots == 6).all()
    assert not moe_gemm_triton(normal(3, 64), normal(5, 128, 64), ours, 6, None).any()
