"""Rejection sampling of drafts (Leviathan et al. 2023, Chen et al. 2023).

A draft that was drawn from q is accepted with probability min(1, p / q), where p is what the target would draw from;
else max(p - q, 0) is drawn from. Either way the token is distributed like p. The randomness is a stream of its own:
the noise that the draft was drawn with says nothing about it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.philox import PURPOSE_REJECT, uniforms
from slipring.kernels.sampling import DrawParams, keep_filtered


def accept_or_draw(logits: Tensor, params: DrawParams, drafts: Tensor, token_ids: Tensor, chances: Tensor) -> Tensor:
    """logits [R, V] float32, finite maxima; drafts [R] int64, drawn with chances [R, C] float32 among the different
    tokens token_ids [R, C] int64 (chances of 0 may fill the rows up) -> tokens [R] int64: the draft, or another one.
    `params` temperatures are not greedy.
    """
    target = keep_filtered(logits / params.temperature.unsqueeze(1), params).softmax(1)
    uniform = uniforms(PURPOSE_REJECT, params.seed, params.position, params.choice)
    asked = (chances * (token_ids == drafts.unsqueeze(1))).sum(1)
    given = target.gather(1, drafts.unsqueeze(1)).squeeze(1)
    rejected = torch.nonzero(uniform[:, 0] * asked >= given).squeeze(1)
    if not len(rejected):
        return drafts
    rest = target[rejected].scatter_add_(1, token_ids[rejected], -chances[rejected]).clamp_(min=0)
    below = rest.cumsum(1, dtype=torch.float64)
    total = below[:, -1:]
    drawn = torch.searchsorted(below, total * uniform[rejected, 1:2], right=True)
    # Nothing is left where both are the same but for rounding.
    return drafts.index_put((rejected,), torch.where(total > 0, drawn, drafts[rejected].unsqueeze(1)).squeeze(1))
