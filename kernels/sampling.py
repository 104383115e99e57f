"""Drawing tokens: penalties, filters and Gumbel-max, batched over rows, without state and in fp32.

Definitions are vLLM's. A filter is a cutoff: the smallest score that is kept, so ties at the boundary are kept
together and the result depends neither on sort order nor on neighbours. Filters mostly keep few tokens, so they and
the noise look at each row's best `NUM_CANDIDATES` first; only rows whose kept set reaches beyond those are done over
the whole vocabulary. Noise is keyed by token (`philox.py`), so both ways draw the same token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.philox import noise_for_tokens, noise_for_vocab
from slipring.kernels.sampling_triton import apply_penalties_triton, draw_triton

NUM_CANDIDATES = 256
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
_WIDE_ROWS = 4
"""Rows of full-vocabulary noise made at once: bounds the scratch memory."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Per row of a draw, [R] each."""

    temperature: Tensor
    top_k: Tensor
    """int64; 0: off."""
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    """[R, 2] int64: low and high 32 bits."""
    position: Tensor
    """int64: index of the drawn token in its sequence."""
    choice: Tensor
    """int64."""

    def take(self, rows: Tensor) -> DrawParams:
        return DrawParams(*(getattr(self, name)[rows] for name in self.__slots__))


def apply_penalties_ref(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """In place. logits [P, V] float32; prompt_mask [P, V] bool; output_counts [P, V] int32; the rest [P] float32.

    Repetition divides positive and multiplies negative logits of tokens in the prompt or the output; frequency and
    presence are subtracted for tokens of the output.
    """
    seen = output_counts > 0
    repetition = repetition.unsqueeze(1)
    factor = torch.where(logits > 0, 1.0 / repetition, repetition)
    logits.mul_(torch.where(prompt_mask | seen, factor, 1.0))
    logits.sub_(output_counts * frequency.unsqueeze(1)).sub_(seen * presence.unsqueeze(1))


def cutoff_ref(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, whole: bool) -> Tensor:
    """The smallest score that min_p, then top_k, then top_p keep; [R].

    ordered [R, C] are a row's best scores, falling; total [R] is the log-sum-exp of the whole row. Unless `ordered`
    is the whole row, a result that does not lie above its last score only says that the row must be done whole.
    """
    limit = torch.where(min_p > 0, ordered[:, 0] + min_p.log(), float("-inf"))
    kth = ordered.gather(1, (top_k - 1).clamp(0, ordered.shape[1] - 1).unsqueeze(1)).squeeze(1)
    limit = torch.where(top_k > 0, torch.maximum(limit, kth), limit)
    # top_p shares out the mass that min_p and top_k leave, which must then lie within `ordered`.
    known = torch.isneginf(limit) | (limit > ordered[:, -1]) | whole
    kept = ordered >= limit.unsqueeze(1)
    cut = torch.logsumexp(ordered.masked_fill(~kept, float("-inf")), dim=1)
    mass = torch.where(limit > float("-inf"), cut, total)
    probs = (ordered - mass.unsqueeze(1)).exp_().mul_(kept)
    # A token stays while the mass strictly before it is below top_p; the best one always stays.
    before = probs.cumsum(1).sub_(probs)
    num_kept = ((before < top_p.unsqueeze(1)) & kept).sum(1).clamp_(min=1)
    nucleus = ordered.gather(1, (num_kept - 1).unsqueeze(1)).squeeze(1)
    cutoff = torch.where(top_p < 1, torch.maximum(limit, nucleus), limit)
    return cutoff.masked_fill_(~known, float("-inf"))


def draw_ref(logits: Tensor, params: DrawParams) -> Tensor:
    """logits [R, V] float32, finite maxima -> drawn token ids [R] int64. `params` temperatures are not greedy."""
    scores = logits / params.temperature.unsqueeze(1)
    filtered = _has_filter(params)
    if not filtered.any():
        return _draw_wide(scores, params)
    ordered, token_ids, cutoff = _candidates(scores, params)
    noisy = noise_for_tokens(token_ids, params.seed, params.position, params.choice).add_(ordered)
    noisy.masked_fill_(ordered < cutoff.unsqueeze(1), float("-inf"))
    drawn = token_ids.gather(1, noisy.argmax(1, keepdim=True)).squeeze(1)
    if len(wide := torch.nonzero(~filtered | _reaches_beyond(ordered, cutoff)).squeeze(1)):
        drawn[wide] = _draw_wide(_filter(scores[wide], params.take(wide)), params.take(wide))
    return drawn


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """As `draw_ref`, on whatever device the logits are. On a GPU greedy temperatures are allowed too."""
    if logits.is_cuda:
        return draw_triton(logits, *(getattr(params, name) for name in params.__slots__), greedy_below=GREEDY_BELOW)
    return draw_ref(logits, params)


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """As `apply_penalties_ref`, on whatever device the logits are."""
    run = apply_penalties_triton if logits.is_cuda else apply_penalties_ref
    run(logits, prompt_mask, output_counts, repetition, presence, frequency)


def keep_filtered(scores: Tensor, params: DrawParams) -> Tensor:
    """scores [R, V], divided by their temperatures -> the same with whatever the filters leave out at -inf."""
    filtered = _has_filter(params)
    if not filtered.any():
        return scores
    ordered, _, cutoff = _candidates(scores, params)
    kept = scores.masked_fill(scores < cutoff.unsqueeze(1), float("-inf"))
    if len(wide := torch.nonzero(filtered & _reaches_beyond(ordered, cutoff)).squeeze(1)):
        kept[wide] = _filter(scores[wide], params.take(wide))
    return kept


def _has_filter(params: DrawParams) -> Tensor:
    return (params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0)


def _candidates(scores: Tensor, params: DrawParams) -> tuple[Tensor, Tensor, Tensor]:
    """scores [R, V] -> each row's best ones, falling, and their tokens, [R, C] both; and the filters' cutoff [R], as
    far as it lies within these (`_reaches_beyond`)."""
    ordered, token_ids = scores.topk(min(NUM_CANDIDATES, scores.shape[1]), dim=1)
    cutoff = cutoff_ref(ordered, scores.logsumexp(1), params.top_k, params.top_p, params.min_p, whole=False)
    return ordered, token_ids, cutoff


def _reaches_beyond(ordered: Tensor, cutoff: Tensor) -> Tensor:
    """[R]: what is kept may not all lie within the best scores ordered [R, C]."""
    return (ordered[:, -1] >= cutoff) & ~torch.isneginf(ordered[:, -1])


def _filter(scores: Tensor, params: DrawParams) -> Tensor:
    """Scores with everything below the cutoff at -inf, by sorting whole rows."""
    ordered = scores.sort(dim=1, descending=True).values
    cutoff = cutoff_ref(ordered, scores.logsumexp(1), params.top_k, params.top_p, params.min_p, whole=True)
    return scores.masked_fill(scores < cutoff.unsqueeze(1), float("-inf"))


def _draw_wide(scores: Tensor, params: DrawParams) -> Tensor:
    drawn = torch.empty(scores.shape[0], dtype=torch.int64)
    for begin in range(0, scores.shape[0], _WIDE_ROWS):
        rows = slice(begin, begin + _WIDE_ROWS)
        noise = noise_for_vocab(scores.shape[1], params.seed[rows], params.position[rows], params.choice[rows])
        drawn[rows] = noise.add_(scores[rows]).argmax(1)
    return drawn
