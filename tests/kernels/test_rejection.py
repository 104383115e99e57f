"""Whatever drafts are drawn from, what comes out is distributed like the target, and as many are accepted as can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipring.kernels.philox import PURPOSE_REJECT, uniforms
from slipring.kernels.rejection import accept_or_draw
from slipring.kernels.sampling import NUM_CANDIDATES, keep_filtered
from tests.kernels.test_sampling import keys, params

NUM_ROWS, VOCAB = 20_000, 12


def kept_plainly(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """[V] -> [V]: the definitions of the filters, written down plainly."""
    chances = scores.double().softmax(0)
    order = chances.argsort(descending=True, stable=True)
    order = order[chances[order] >= min_p * chances.max()]
    order = order[: top_k or len(order)]
    share = chances[order] / chances[order].sum()
    order = order[share.cumsum(0) - share < top_p]
    found = torch.full_like(scores, float("-inf"))
    found[order] = scores[order]
    return found


@pytest.mark.parametrize("draft", ["alike", "elsewhere", "few"])
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (6, 0.85, 0.05)], ids=["unfiltered", "filtered"])
def test_tokens_are_distributed_like_the_target(filters: tuple[int, float, float], draft: str) -> None:
    generator, temperature = torch.Generator().manual_seed(3), 0.8
    logits = torch.randn(VOCAB, generator=generator)
    target = kept_plainly(logits / temperature, *filters).softmax(0).double()
    best, token_ids = {"alike": logits + 0.5, "elsewhere": -logits, "few": logits}[draft].topk(
        3 if draft == "few" else 8
    )
    chances = best.softmax(0)
    at = chances.multinomial(NUM_ROWS, replacement=True, generator=generator)
    of_row = replace(params(NUM_ROWS, *filters), temperature=torch.full((NUM_ROWS,), temperature))
    rows = (each.expand(NUM_ROWS, -1) for each in (token_ids, chances))
    drafts = token_ids[at]
    tokens = accept_or_draw(logits.expand(NUM_ROWS, -1), of_row, drafts, *rows)
    source = torch.zeros(VOCAB, dtype=torch.float64).scatter_(0, token_ids, chances.double())
    common = float(torch.minimum(source, target).sum())
    accepted = float((tokens == drafts).double().mean())
    assert abs(accepted - common) < 4 * np.sqrt(0.25 / NUM_ROWS)
    assert 0.01 < common < 0.999, "the test needs accepted drafts, and rejected ones"
    want, count = NUM_ROWS * target, tokens.bincount(minlength=VOCAB)
    assert not count[want == 0].any()
    there = want > 0
    chi_square, degrees = float(((count - want) ** 2 / want)[there].sum()), int(there.sum()) - 1
    assert (chi_square - degrees) / np.sqrt(2 * degrees) < 4


def test_what_must_be_accepted_or_rejected() -> None:
    logits, token_ids = torch.tensor([[2.0, 1.0, 0.0, float("-inf")]]).expand(500, -1), torch.arange(4).expand(500, -1)
    same = logits.softmax(1)
    drafts = same.multinomial(1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    assert torch.equal(accept_or_draw(logits, params(500), drafts, token_ids, same), drafts)
    never = torch.full((500,), 3)
    drawn = accept_or_draw(logits, params(500), never, never.unsqueeze(1), torch.ones(500, 1))
    assert set(drawn.tolist()) == {0, 1, 2}
    assert torch.equal(drawn, accept_or_draw(logits, params(500), never, never.unsqueeze(1), torch.ones(500, 1)))


def test_its_randomness_is_uniform_and_keyed() -> None:
    key = keys(20_000)
    found = uniforms(PURPOSE_REJECT, **key)
    assert found.min() > 0 and found.max() < 1
    assert (found.mean(0) - 0.5).abs().max() < 4 * np.sqrt(1 / 12 / 20_000)
    assert abs(np.corrcoef(found[:, 0], found[:, 1])[0, 1]) < 4 / np.sqrt(20_000)
    other = uniforms(PURPOSE_REJECT, **(key | {"position": key["position"] + 1}))
    assert (found[:, 0] != other[:, 0]).double().mean() > 0.999


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.5, 0.0), (7, 1.0, 0.0), (400, 0.999, 0.0), (0, 0.9, 0.01)])
def test_filters_leave_what_their_definitions_leave(top_k: int, top_p: float, min_p: float) -> None:
    scores = torch.randn((3, 2 * NUM_CANDIDATES), generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [[0.1], [1.0], [4.0]]
    )
    found = keep_filtered(scores, params(3, top_k, top_p, min_p))
    for row, kept in zip(scores, found, strict=True):
        assert torch.equal(kept, kept_plainly(row, top_k, top_p, min_p))
