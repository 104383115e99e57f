"""References of routing, sorting and the grouped GEMM against plain definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels.moe_gemm import choose_tile_rows, moe_gemm
from slipring.kernels.moe_route import route_topk, sort_by_expert
from tests.kernels.tolerances import DTYPES, TOLERANCE


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_is_softmax_then_top_k(renormalize: bool) -> None:
    logits = normal(7, 12)
    weights, experts = route_topk(logits, 3, renormalize)
    expected, chosen = logits.double().softmax(-1).topk(3)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(experts.long(), chosen)
    assert (weights.double() - expected).abs().max() <= TOLERANCE[torch.float32]
    assert route_topk(torch.zeros(1, 5), 2, renormalize)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("tile_rows", [1, 4, 16])
@pytest.mark.parametrize("absent", [False, True])
def test_sorting_lists_every_slot_once_by_expert(tile_rows: int, absent: bool) -> None:
    num_experts = 5
    experts = normal(13, num_experts).argsort(1)[:, :3].int()
    if absent:
        experts[experts == 2] = -1
    found = sort_by_expert(experts, num_experts, tile_rows)
    expected: list[int] = []
    owners: list[int] = []
    for expert in range(num_experts):
        mine = torch.nonzero(experts.flatten() == expert).flatten().tolist()
        mine += [experts.numel()] * (-len(mine) % tile_rows)
        expected += mine
        owners += [expert] * (len(mine) // tile_rows)
    assert found.num_rows.tolist() == [len(expected)]
    assert found.slots[: len(expected)].tolist() == expected
    assert (found.slots[len(expected) :] == experts.numel()).all()
    assert found.tile_expert[: len(owners)].tolist() == owners


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_grouped_products_make_a_layer(dtype: torch.dtype) -> None:
    num_tokens, num_experts, top_k, hidden, inner = 11, 4, 2, 24, 40
    x = normal(num_tokens, hidden, dtype=dtype)
    up, down = normal(num_experts, inner, hidden) / hidden**0.5, normal(num_experts, hidden, inner) / inner**0.5
    up, down = up.to(dtype), down.to(dtype)
    weights, experts = route_topk(normal(num_tokens, num_experts), top_k, True)
    num_slots = num_tokens * top_k
    slots = sort_by_expert(experts, num_experts, choose_tile_rows(num_slots, num_experts))
    middle = moe_gemm(x, up, slots, num_slots)
    ours = moe_gemm(middle, down, slots, num_slots, weights.flatten()).view(num_tokens, top_k, hidden).sum(1)
    for token in range(num_tokens):
        expected = torch.zeros(hidden, dtype=torch.float64)
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            expected += weight * (down[expert].double() @ (up[expert].double() @ x[token].double()))
        assert (ours[token].double() - expected).abs().max() <= TOLERANCE[dtype]


def test_an_absent_experts_slots_are_zero() -> None:
    experts = torch.tensor([[0, -1], [1, 0]], dtype=torch.int32)
    y = moe_gemm(normal(2, 8), normal(2, 4, 8), sort_by_expert(experts, 2, 16), 4)
    assert (y[1] == 0).all() and (y[[0, 2, 3]] != 0).any(1).all()
