"""Verification against the walk written plainly, and its promise: the tokens are those of decoding without drafts."""

from __future__ import annotations

import pytest
import torch

from slipring.kernels.spec_verify import verify_chain, verify_tree
from tests.kernels.draft_trees import random_trees


@pytest.mark.parametrize("width", [1, 4, 7])
def test_a_chain_is_accepted_up_to_its_first_wrong_draft(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    drafts = torch.randint(0, 2, (60, width), generator=generator)
    targets = torch.randint(0, 2, (60, width + 1), generator=generator)
    num_draft = torch.randint(0, width + 1, (60,), generator=generator, dtype=torch.int32)
    num_accepted, tokens = verify_chain(drafts, targets, num_draft)
    for row in range(60):
        count = 0
        while count < num_draft[row] and drafts[row, count] == targets[row, count]:
            count += 1
        assert num_accepted[row] == count
        assert tokens[row].tolist() == targets[row, : count + 1].tolist() + [-1] * (width - count)


@pytest.mark.parametrize("width", [1, 12, 64])
def test_a_tree_is_walked_along_the_targets_tokens(width: int) -> None:
    nodes, parents, targets, num_nodes, max_depth = random_trees(40, width)
    num_accepted, tokens, path = verify_tree(nodes, parents, targets, num_nodes, max_depth)
    for row in range(40):
        walk = [0]
        while True:
            want = targets[row, walk[-1]]
            children = [
                node
                for node in range(1, int(num_nodes[row]))
                if parents[row, node] == walk[-1] and nodes[row, node] == want
            ]
            if not children:
                break
            walk.append(children[0])
        rest = [-1] * (max_depth + 1 - len(walk))
        assert num_accepted[row] == len(walk) - 1
        assert path[row].tolist() == walk + rest
        assert tokens[row].tolist() == targets[row, walk].tolist() + rest


def next_token(context: list[int]) -> int:
    """A target whose token depends on all that came before."""
    return hash(tuple(context)) % 3


def test_speculating_gives_the_tokens_of_decoding() -> None:
    plain = [1]
    while len(plain) < 60:
        plain.append(next_token(plain))
    context = [1]
    generator = torch.Generator().manual_seed(0)
    while len(context) < 50:
        drafts = torch.randint(0, 3, (1, 4), generator=generator)
        targets = [next_token(context + drafts[0, :i].tolist()) for i in range(5)]
        num_accepted, tokens = verify_chain(drafts, torch.tensor([targets]), torch.tensor([4], dtype=torch.int32))
        context += tokens[0, : int(num_accepted) + 1].tolist()
    assert context == plain[: len(context)]
