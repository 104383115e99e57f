"""Attention while training, as a chain will have it when it is served."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.rope import rope
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.eagle_head import Attend

Past = list[tuple[Tensor, Tensor]]
"""Keys and values [T, H, D] of each guess so far, the first of them made from the target's features."""


def chain_attention(spec: ModelSpec, cos_sin: Tensor, lengths: list[int], past: Past) -> Attend:
    """Attention within each text: what the target has computed is seen by its own keys, and only the guesses since
    then by theirs. cos_sin [T, 2, D]. Adds this guess's keys and values to `past`."""
    groups = spec.num_heads // spec.num_kv_heads
    cos, sin = cos_sin.unsqueeze(2).unbind(1)

    def attend(heads: Tensor, value: Tensor) -> Tensor:
        turned = rope(heads, cos, sin)
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        past.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        out, begin = [], 0
        for length in lengths:
            at = slice(begin, begin + length)
            q = query[at].transpose(0, 1)[None]
            k, v = (torch.cat([each[i][at] for each in past]).transpose(0, 1)[None] for i in range(2))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_chain_mask(length, len(past)))
            out.append(mixed[0].transpose(0, 1).flatten(1))
            begin += length
        return torch.cat(out)

    return attend


def shifted(guessed: Tensor, first: Tensor, lengths: list[int]) -> Tensor:
    """A guess at p stands for the feature at p + 1: there it is the next input. A text's first is the target's."""
    pairs = zip(guessed.split(lengths), first.split(lengths), strict=True)
    return torch.cat([torch.cat((target[:1], guess[:-1])) for guess, target in pairs])


@functools.lru_cache(maxsize=4096)
def _chain_mask(length: int, depth: int) -> Tensor:
    """[length, depth * length] bool: the guess of depth d at position t sees the first keys up to t - d + 1, and of
    each later depth j those at t - d + j."""
    at, key = torch.arange(length)[:, None], torch.arange(length)
    first = key <= at - (depth - 1)
    return torch.cat([first] + [key == at - depth + j for j in range(2, depth + 1)], 1)
