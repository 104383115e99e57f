"""Log-probability and rank of given tokens, in one pass over the logits, and the likeliest tokens beside them.

Online softmax (Milakov and Gimelshein 2018): no row of probabilities is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def gather_logprobs_ref(logits: Tensor, tokens: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [S, V], tokens [S] int64 -> (natural logarithm of softmax at the token [S] float32, rank [S] int64).

    Rank 1 is the most likely token; tokens of equal logits share a rank. total [S, 1]: their log-sum-exp, if known.
    """
    wide = logits.float()
    chosen = wide.gather(1, tokens[:, None])
    total = wide.logsumexp(1, keepdim=True) if total is None else total
    return (chosen - total).squeeze(1), (wide > chosen).sum(1) + 1


@triton.jit(do_not_specialize_on_alignment=["TOKENS"])
def _logprobs_kernel(LOGITS, TOKENS, LOGPROBS, RANKS, stride_row, vocab_size, BLOCK: tl.constexpr):
    """One program a row. Maximum and sum are kept for each lane, and reduced once at the end."""
    row = tl.program_id(0).to(tl.int64)
    line = LOGITS + row * stride_row
    chosen = tl.load(line + tl.load(TOKENS + row)).to(tl.float32)
    best = tl.full([BLOCK], -1e30, tl.float32)  # finite, so that no difference of two infinities can arise
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        logit = tl.load(line + at, at < vocab_size, -float("inf")).to(tl.float32)
        above += (logit > chosen).to(tl.int32)
        new_best = tl.maximum(best, logit)
        total = total * tl.exp(best - new_best) + tl.exp(logit - new_best)
        best = new_best
    top = tl.max(best, 0)
    tl.store(LOGPROBS + row, chosen - top - tl.log(tl.sum(total * tl.exp(best - top), 0)))
    tl.store(RANKS + row, (tl.sum(above, 0) + 1).to(tl.int64))


def gather_logprobs_triton(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As `gather_logprobs_ref`."""
    num_rows, vocab_size = logits.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        arguments = (logits, tokens, logprobs, ranks, logits.stride(0), vocab_size)
        _logprobs_kernel[(num_rows,)](*arguments, **tiles("logprobs"))
    return logprobs, ranks


def gather_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As `gather_logprobs_ref`, on the logits' device."""
    return (gather_logprobs_triton if logits.is_cuda else gather_logprobs_ref)(logits, tokens)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of S distributions; natural logarithms."""

    logprob: Tensor
    """[S] float32, of the given token; the very number that `top_logprobs` has where that is the likeliest."""
    rank: Tensor
    """[S] int64"""
    top_ids: Tensor
    """[S, count] int64, best first."""
    top_logprobs: Tensor
    """[S, count] float32"""


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    """logits [S, V] float32, tokens [S] int64, 0 <= count <= V."""
    total = logits.logsumexp(1, keepdim=True)
    if logits.is_cuda:
        logprob, rank = gather_logprobs_triton(logits, tokens)
    else:
        logprob, rank = gather_logprobs_ref(logits, tokens, total)
    top, top_ids = logits.topk(count, dim=1)
    top -= total
    if count:  # clients compare the two, and two ways to sum an exponential differ in the last bit
        logprob = torch.where(rank == 1, top[:, 0], logprob)
    return TopLogprobs(logprob, rank, top_ids, top)


register("logprobs", any={"BLOCK": 4096, "num_warps": 8, "num_stages": 2})

SPECS = tuple(
    KernelSpec(
        name=f"logprobs.{dtype}",
        kernel=_logprobs_kernel,
        signature={"LOGITS": f"*{dtype}", "TOKENS": "*i64", "LOGPROBS": "*fp32", "RANKS": "*i64"}
        | {"stride_row": "i32", "vocab_size": "i32"},
        tiles="logprobs",
        divisible_by_16=("LOGITS", "LOGPROBS", "RANKS", "stride_row", "vocab_size"),
    )
    for dtype in ("bf16", "fp16", "fp32")
)
