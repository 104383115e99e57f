"""Token masks: logits of tokens that a grammar does not allow become -inf. A mask is one bit a token, lowest first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def apply_token_mask_ref(scores: Tensor, at: Tensor, allowed: Tensor) -> None:
    """In place. scores [S, V] float32; at [k] int64, rows of `scores`; allowed [k, ceil(V / 32)] int32."""
    width = scores.shape[1]
    bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=1, count=width, bitorder="little")
    forbidden = torch.from_numpy(bits) == 0
    for i, row in enumerate(at.tolist()):
        scores[row].masked_fill_(forbidden[i], float("-inf"))


@triton.jit
def token_mask_kernel(SCORES, AT, ALLOWED, width, num_words, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    word = tl.load(ALLOWED + entry * num_words + column // 32, inside, -1)
    forbidden = ((word >> (column % 32)) & 1) == 0
    row = tl.load(AT + entry)
    tl.store(SCORES + row * width + column, tl.full([BLOCK], -float("inf"), tl.float32), inside & forbidden)


def apply_token_mask_triton(scores: Tensor, at: Tensor, allowed: Tensor) -> None:
    """As `apply_token_mask_ref`; all contiguous."""
    width, tile = scores.shape[1], tiles("token_mask")
    grid = (len(at), triton.cdiv(width, tile["BLOCK"]))
    token_mask_kernel[grid](scores, at, allowed, width, allowed.shape[1], **tile)


def apply_token_mask(scores: Tensor, at: Tensor, allowed: Tensor) -> None:
    """As `apply_token_mask_ref`, on whatever device the scores are."""
    (apply_token_mask_triton if scores.is_cuda else apply_token_mask_ref)(scores, at, allowed)


register("token_mask", any={"BLOCK": 2048, "num_warps": 8, "num_stages": 1})

SPECS = (
    KernelSpec(
        "token_mask",
        token_mask_kernel,
        {"SCORES": "*fp32", "AT": "*i64", "ALLOWED": "*i32", "width": "i32", "num_words": "i32"},
        {},
        "token_mask",
    ),
)
