"""Philox4x32-10 (Salmon et al. 2011): counter-based noise, the same on every device.

32-bit words are carried in int64 tensors. The key is a row's 64-bit seed (low word, high word); the counter is
(token_id // 4, position, choice, purpose) and word token_id % 4 of the result belongs to the token: what
`tl.philox(seed, c0, c1, c2, c3)` computes, so a Triton kernel draws the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton

PURPOSE_SAMPLE, PURPOSE_REJECT = 0, 1
"""Counter word 3: what the noise is for."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32_ref(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Counter and key words (int64 tensors below 2^32 that broadcast together) -> four words of their joint shape.

    Words stay as small as their inputs for as long as they can: a counter word that is one number a row costs
    nothing in the first rounds.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # The product may pass 2^63; its bits are right, and the mask drops the shifted-in sign.
        c0 = (product1 >> 32 & _MASK) ^ (c1 ^ k0)
        c2 = (product0 >> 32 & _MASK) ^ (c3 ^ k1)
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_ref(words: Tensor) -> Tensor:
    """32-bit words -> standard Gumbel noise, float32.

    Built from a uniform v near 0 in the upper tail (-log(-log1p(-v))), where floats are dense: the noise reaches
    22.9. v is kept below 1, so the result is finite.
    """
    v = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def noise_for_tokens(token_ids: Tensor, seed: Tensor, position: Tensor, choice: Tensor) -> Tensor:
    """token_ids [R, C] int64; seed [R, 2] (low, high word), position, choice [R] int64 -> Gumbel noise [R, C]."""
    words = philox4x32_ref(_counter(token_ids >> 2, position, choice), _key(seed))
    lane = (token_ids & 3).unsqueeze(-1)
    return gumbel_ref(torch.stack(words, -1).gather(-1, lane).squeeze(-1))


def noise_for_vocab(vocab_size: int, seed: Tensor, position: Tensor, choice: Tensor) -> Tensor:
    """As `noise_for_tokens` for all tokens: [R, vocab_size]."""
    quads = torch.arange(-(-vocab_size // 4)).unsqueeze(0)
    words = philox4x32_ref(_counter(quads, position, choice), _key(seed))
    return gumbel_ref(torch.stack(words, -1).flatten(1)[:, :vocab_size])


def uniforms(purpose: int, seed: Tensor, position: Tensor, choice: Tensor) -> Tensor:
    """seed [R, 2], position, choice [R] as above -> [R, 4] float64, above 0 and below 1."""
    words = philox4x32_ref(_counter(torch.zeros((1, 1), dtype=torch.int64), position, choice, purpose), _key(seed))
    return torch.cat(words, 1).double().add_(0.5).mul_(2.0**-32)


def _counter(quads: Tensor, position: Tensor, choice: Tensor, purpose: int = PURPOSE_SAMPLE) -> Words:
    return quads, position.unsqueeze(1), choice.unsqueeze(1), torch.full((1, 1), purpose, dtype=torch.int64)


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed[:, 0:1], seed[:, 1:2]


@triton.jit
def gumbel_for_block(begin, seed_low, seed_high, position, choice, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """Inside a kernel: the noise of tokens begin .. begin + BLOCK, for a row's key (int64 scalars); both divide by 4.

    Equals `noise_for_tokens` but for the last bits of the logarithms.
    """
    quad = (begin // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    seed = (seed_high << 32) | seed_low
    w0, w1, w2, w3 = tl.philox(seed, quad, position.to(tl.uint32), choice.to(tl.uint32), PURPOSE)
    # Two rounds of interleaving put word i of quad q at 4 q + i.
    return _gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _gumbel(words):
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    # -log1p(-v), which Triton lacks: 2 atanh(v / (2 - v)) by its series where v is small, elsewhere as it stands.
    s = tl.div_rn(v, 2.0 - v)
    q = s * s
    small = 2.0 * s * (1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9)))))
    exponential = tl.where(v < 0.25, small, -tl.log(1.0 - v))
    return -tl.log(exponential)
