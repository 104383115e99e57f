"""Verification of chains and trees against the references: integers, so equal."""

from __future__ import annotations

import pytest
import torch

from slipring.kernels.spec_verify import verify_chain_ref, verify_chain_triton, verify_tree_ref, verify_tree_triton
from tests.kernels.draft_trees import random_trees


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (5, 3), (40, 7)])
def test_verify_chain(num_rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    drafts = torch.randint(0, 2, (num_rows, width), generator=generator)
    targets = torch.randint(0, 2, (num_rows, width + 1), generator=generator)
    num_draft = torch.randint(0, width + 1, (num_rows,), generator=generator, dtype=torch.int32)
    for ours, expected in zip(
        verify_chain_triton(drafts, targets, num_draft), verify_chain_ref(drafts, targets, num_draft), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (6, 11), (8, 64)])
def test_verify_tree(num_rows: int, width: int) -> None:
    tree = random_trees(num_rows, width)
    for ours, expected in zip(verify_tree_triton(*tree), verify_tree_ref(*tree), strict=True):
        assert torch.equal(ours, expected)
