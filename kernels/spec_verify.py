"""Speculative verification: which drafts the target's own draws agree with.

The target's token at each position has been drawn with that position's noise (or is the argmax, for greedy rows) as it
would be without drafts. A chain's draft is accepted while it equals the target's token at its place; in a tree the
walk descends to the child that equals the token drawn at its node. Either way the step's result is the target's own
tokens: those that were accepted, and one more.

For workers whose draws are tensors on a device. A CPU worker draws along the walk (`workers/speculation/verify.py`),
so that it draws nothing where no walk comes by; `tests/workers/speculation/test_tree.py` holds both to the same rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles

NOTHING = -1
"""Fills outputs beyond what was accepted."""


def verify_chain_ref(drafts: Tensor, targets: Tensor, num_draft: Tensor) -> tuple[Tensor, Tensor]:
    """drafts [B, K], targets [B, K + 1] int64, num_draft [B] int32, at most K -> (num_accepted [B] int32, tokens).

    targets[:, i] was drawn after the row's last token and drafts[:, :i]. tokens [B, K + 1] int64 are
    targets[:, :num_accepted + 1], then -1.
    """
    place = torch.arange(targets.shape[1], device=drafts.device)
    equal = (drafts == targets[:, :-1]) & (place[:-1] < num_draft.unsqueeze(1))
    num_accepted = equal.int().cumprod(1).sum(1, dtype=torch.int32)
    return num_accepted, targets.masked_fill(place > num_accepted.unsqueeze(1), NOTHING)


def verify_tree_ref(
    nodes: Tensor, parents: Tensor, targets: Tensor, num_nodes: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """nodes [B, N] int64 token ids, parents [B, N] int32, targets [B, N] int64, num_nodes [B] int32.

    Node 0 is the row's last token (its id is not looked at); targets[:, i] was drawn after node i and its ancestors.
    Returns (num_accepted [B] int32, tokens [B, max_depth + 1] int64, path [B, max_depth + 1] int32): path holds the
    nodes walked, beginning with 0, tokens the target's token at each of them, and -1 follows. Of children with the same
    token the first is taken. `max_depth` bounds the walk: the depth of the deepest node, or more.
    """
    num_rows, width = nodes.shape
    row, place = torch.arange(num_rows, device=nodes.device), torch.arange(width, device=nodes.device)
    path = torch.full((num_rows, max_depth + 1), NOTHING, device=nodes.device, dtype=torch.int32)
    tokens = path.long()
    node, alive = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
    num_accepted = torch.full_like(path[:, 0], -1)
    for depth in range(max_depth + 1):
        want = targets[row, node]
        path[:, depth] = torch.where(alive, node, NOTHING)
        tokens[:, depth] = torch.where(alive, want, NOTHING)
        num_accepted += alive
        child = (parents == node.unsqueeze(1)) & (nodes == want.unsqueeze(1)) & (place < num_nodes.unsqueeze(1))
        child[:, 0] = False
        alive = alive & child.any(1)
        node = torch.where(alive, child.int().argmax(1), node)
    return num_accepted, tokens, path


@triton.jit(do_not_specialize=["num_rows"])
def verify_chain_kernel(
    DRAFTS, TARGETS, NUM_DRAFT, NUM_ACCEPTED, TOKENS, num_rows, num_places,
    ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """num_places = K + 1; PLACES is it rounded up to a power of two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, PLACES)[None, :]
    inside = (row < num_rows)[:, None] & (place < num_places)
    target = tl.load(TARGETS + row[:, None] * num_places + place, inside, -1)
    asked = inside & (place < tl.load(NUM_DRAFT + row, row < num_rows, 0)[:, None])
    draft = tl.load(DRAFTS + row[:, None] * (num_places - 1) + place, asked, -1)
    num_accepted = tl.min(tl.where(asked & (draft == target), PLACES, place), 1)  # the first that is not equal
    tl.store(NUM_ACCEPTED + row, num_accepted, row < num_rows)
    tokens = tl.where(place <= num_accepted[:, None], target, -1)
    tl.store(TOKENS + row[:, None] * num_places + place, tokens, inside)


@triton.jit
def verify_tree_kernel(
    NODES, PARENTS, TARGETS, NUM_NODES, NUM_ACCEPTED, TOKENS, PATH, width, max_depth, WIDTH: tl.constexpr
):
    """One program a row. The walk ends where no child has the token."""
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    known = place < tl.load(NUM_NODES + row)
    token = tl.load(NODES + row * width + place, known, -1)
    parent = tl.load(PARENTS + row * width + place, known & (place > 0), -1)
    node = 0
    num_visited = 0
    for depth in range(max_depth + 1):
        alive = node < WIDTH
        want = tl.load(TARGETS + row * width + node, alive, -1)
        at = row * (max_depth + 1) + depth
        tl.store(PATH + at, tl.where(alive, node, -1))
        tl.store(TOKENS + at, want)
        num_visited += alive.to(tl.int32)
        node = tl.min(tl.where((parent == node) & (token == want) & alive, place, WIDTH), 0)
    tl.store(NUM_ACCEPTED + row, num_visited - 1)


register("spec_verify.chain", any={"ROWS": 8, "num_warps": 1, "num_stages": 1})
register("spec_verify.tree", any={"num_warps": 1, "num_stages": 1})


def verify_chain_triton(drafts: Tensor, targets: Tensor, num_draft: Tensor) -> tuple[Tensor, Tensor]:
    """As `verify_chain_ref`; all contiguous."""
    num_rows, num_places = targets.shape
    num_accepted, tokens = torch.empty_like(num_draft), torch.empty_like(targets)
    tile = tiles("spec_verify.chain")
    verify_chain_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
        drafts, targets, num_draft, num_accepted, tokens, num_rows, num_places,
        PLACES=triton.next_power_of_2(num_places), **tile,
    )  # fmt: skip
    return num_accepted, tokens


def verify_tree_triton(
    nodes: Tensor, parents: Tensor, targets: Tensor, num_nodes: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_tree_ref`; all contiguous."""
    num_rows, width = nodes.shape
    num_accepted = torch.empty_like(num_nodes)
    path = parents.new_empty(num_rows, max_depth + 1)
    tokens = targets.new_empty(num_rows, max_depth + 1)
    verify_tree_kernel[(num_rows,)](
        nodes, parents, targets, num_nodes, num_accepted, tokens, path, width, max_depth,
        WIDTH=triton.next_power_of_2(width), **tiles("spec_verify.tree"),
    )  # fmt: skip
    return num_accepted, tokens, path


def verify_chain(drafts: Tensor, targets: Tensor, num_draft: Tensor) -> tuple[Tensor, Tensor]:
    """As `verify_chain_ref`, on whatever device the tensors are."""
    return (verify_chain_triton if drafts.is_cuda else verify_chain_ref)(drafts, targets, num_draft)


def verify_tree(
    nodes: Tensor, parents: Tensor, targets: Tensor, num_nodes: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_tree_ref`, on whatever device the tensors are."""
    return (verify_tree_triton if nodes.is_cuda else verify_tree_ref)(nodes, parents, targets, num_nodes, max_depth)


def _specs() -> tuple[KernelSpec, ...]:
    both = {"TARGETS": "*i64", "NUM_ACCEPTED": "*i32", "TOKENS": "*i64"}
    chain = both | {"DRAFTS": "*i64", "NUM_DRAFT": "*i32", "num_rows": "i32", "num_places": "i32"}
    tree = both | {"NODES": "*i64", "PARENTS": "*i32", "NUM_NODES": "*i32", "PATH": "*i32"}
    tree |= {"width": "i32", "max_depth": "i32"}
    chains = [
        KernelSpec(f"spec_verify.chain.{n}", verify_chain_kernel, chain, {"PLACES": n}, "spec_verify.chain")
        for n in (8, 32)
    ]
    trees = [
        KernelSpec(f"spec_verify.tree.{n}", verify_tree_kernel, tree, {"WIDTH": n}, "spec_verify.tree") for n in (64,)
    ]
    return (*chains, *trees)


SPECS = _specs()
