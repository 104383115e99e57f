"""Sampling on a GPU: penalties, then one program a row that filters and draws without a sort (used by `sampling.py`).

A filter is a cutoff, as in the reference: min_p gives it at once; for top_k it is the largest logit that k logits
reach, and for top_p the largest whose mass, with all above it, reaches p of what is left. Both are found by bisection
over the bits of the floats, read as integers of the same order, so that the search ends and is exact. Each pass over
the row tries three thresholds, and the search stops early once a single logit lies in the interval.

The reference divides by the temperature before it filters; here the cutoff is one of logits, which keeps the same
tokens but for roundings at the boundary. Noise is `philox.py`'s for the same key, to the last bits of a logarithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.philox import PURPOSE_SAMPLE, gumbel_for_block
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


@triton.jit
def penalties_kernel(LOGITS, PROMPT_MASK, OUTPUT_COUNTS, REPETITION, PRESENCE, FREQUENCY, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    logits = tl.load(LOGITS + at, inside, 0.0)
    counts = tl.load(OUTPUT_COUNTS + at, inside, 0)
    in_prompt = tl.load(PROMPT_MASK + at, inside, 0) != 0
    repetition = tl.load(REPETITION + row)
    factor = tl.where(logits > 0, tl.div_rn(1.0, repetition), repetition)
    logits *= tl.where(in_prompt | (counts > 0), factor, 1.0)
    logits -= counts.to(tl.float32) * tl.load(FREQUENCY + row)
    logits -= tl.where(counts > 0, tl.load(PRESENCE + row), 0.0)
    tl.store(LOGITS + at, logits, inside)


@triton.jit
def _ordered(x):
    """Float32 -> int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(ordered):
    """The inverse of `_ordered`."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(LOGITS, begin, width, BLOCK: tl.constexpr):
    column = begin + tl.arange(0, BLOCK)
    return tl.load(LOGITS + column, column < width, -float("inf"))


@triton.jit
def _count_and_mass(LOGITS, width, cutoff, top, per_log2, BLOCK: tl.constexpr):
    """How many logits reach the cutoff, and their mass, where the best one's is 1."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        x = _load(LOGITS, begin, width, BLOCK)
        count += (x >= cutoff).to(tl.int32)
        mass += tl.where(x >= cutoff, tl.exp2((x - top) * per_log2), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _largest_cutoff(
    LOGITS, width, top, per_log2, low, count_low, num_wanted, mass_wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest cutoff, `low` or above, that num_wanted logits (or mass_wanted of mass) reach; `low` if none is.

    Cutoffs are in `_ordered` form. What `high` admits is never enough; count_low bounds what `low` admits.
    """
    high = _ordered(top) + 1
    count_high = 0
    while (low + 1 < high) & (count_low - count_high > 1):
        quarter = (high.to(tl.int64) - low) // 4
        t1 = low + quarter.to(tl.int32)
        t2 = low + ((high.to(tl.int64) - low) // 2).to(tl.int32)
        t3 = tl.maximum(t2, high - 1 - quarter.to(tl.int32))
        c1, c2, c3 = _float(t1), _float(t2), _float(t3)
        n1, n2, n3 = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        m1, m2, m3 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for begin in range(0, width, BLOCK):
            x = _load(LOGITS, begin, width, BLOCK)
            n1 += (x >= c1).to(tl.int32)
            n2 += (x >= c2).to(tl.int32)
            n3 += (x >= c3).to(tl.int32)
            if BY_MASS:
                mass = tl.exp2((x - top) * per_log2)
                m1 += tl.where(x >= c1, mass, 0.0)
                m2 += tl.where(x >= c2, mass, 0.0)
                m3 += tl.where(x >= c3, mass, 0.0)
        k1, k2, k3 = tl.sum(n1, 0), tl.sum(n2, 0), tl.sum(n3, 0)
        if BY_MASS:
            e1, e2, e3 = tl.sum(m1, 0) >= mass_wanted, tl.sum(m2, 0) >= mass_wanted, tl.sum(m3, 0) >= mass_wanted
        else:
            e1, e2, e3 = k1 >= num_wanted, k2 >= num_wanted, k3 >= num_wanted
        high = tl.where(e3, high, tl.where(e2, t3, tl.where(e1, t2, t1)))
        count_high = tl.where(e3, count_high, tl.where(e2, k3, tl.where(e1, k2, k1)))
        low = tl.where(e3, t3, tl.where(e2, t2, tl.where(e1, t1, low)))
        count_low = tl.where(e3, k3, tl.where(e2, k2, tl.where(e1, k1, count_low)))
    return low


@triton.jit
def _cutoff(LOGITS, width, top, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The smallest logit that min_p, then top_k, then top_p keep; -inf if nothing filters."""
    per_log2 = 1.4426950408889634 / temperature
    limit = tl.where(min_p > 0, top + temperature * tl.log(tl.maximum(min_p, 1e-37)), -float("inf"))
    low = _ordered(limit)
    if top_k > 0:
        low = _largest_cutoff(LOGITS, width, top, per_log2, low, width, top_k, 0.0, False, BLOCK)
    if top_p < 1:
        count, mass = _count_and_mass(LOGITS, width, _float(low), top, per_log2, BLOCK)
        low = _largest_cutoff(LOGITS, width, top, per_log2, low, count, 0, mass * top_p, True, BLOCK)
    return _float(low)


@triton.jit
def draw_kernel(
    LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, POSITION, CHOICE, DRAWN, width,
    GREEDY_BELOW: tl.constexpr, PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. A greedy row's cutoff is its best logit, and it gets no noise."""
    row = tl.program_id(0).to(tl.int64)
    LOGITS += row * width
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    for begin in range(0, width, BLOCK):
        best = tl.maximum(best, _load(LOGITS, begin, width, BLOCK))
    top = tl.max(best, 0)
    temperature = tl.load(TEMPERATURE + row)
    cutoff = top
    if temperature >= GREEDY_BELOW:
        top_k = tl.load(TOP_K + row).to(tl.int32)
        top_p, min_p = tl.load(TOP_P + row), tl.load(MIN_P + row)
        cutoff = _cutoff(LOGITS, width, top, temperature, top_k, top_p, min_p, BLOCK)
    seed_low, seed_high = tl.load(SEED + 2 * row), tl.load(SEED + 2 * row + 1)
    position, choice = tl.load(POSITION + row), tl.load(CHOICE + row)
    best_score = -float("inf")
    drawn = 0
    for begin in range(0, width, BLOCK):
        x = _load(LOGITS, begin, width, BLOCK)
        if tl.max(x, 0) >= cutoff:  # most blocks hold nothing that is kept, and need no noise
            scores = x
            if temperature >= GREEDY_BELOW:
                noise = gumbel_for_block(begin, seed_low, seed_high, position, choice, PURPOSE, BLOCK)
                scores = tl.div_rn(x, temperature) + noise
            scores = tl.where(x >= cutoff, scores, -float("inf"))
            block_best = tl.max(scores, 0)
            drawn = tl.where(block_best > best_score, begin + tl.argmax(scores, 0), drawn)
            best_score = tl.maximum(best_score, block_best)
    tl.store(DRAWN + row, drawn)


register("sampling.penalties", any={"BLOCK": 2048, "num_warps": 8, "num_stages": 1})
register("sampling.draw", any={"BLOCK": 4096, "num_warps": 16, "num_stages": 3})


def apply_penalties_triton(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """As `apply_penalties_ref`; all contiguous."""
    num_rows, width = logits.shape
    tile = tiles("sampling.penalties")
    grid = (num_rows, triton.cdiv(width, tile["BLOCK"]))
    penalties_kernel[grid](logits, prompt_mask, output_counts, repetition, presence, frequency, width, **tile)


def draw_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    choice: Tensor,
    greedy_below: float,
) -> Tensor:
    """As `draw_ref`, with `DrawParams`' columns, all contiguous; rows below `greedy_below` take their best logit."""
    num_rows, width = logits.shape
    drawn = torch.empty(num_rows, device=logits.device, dtype=torch.int64)
    constants = {"GREEDY_BELOW": greedy_below, "PURPOSE": PURPOSE_SAMPLE}
    draw_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, seed, position, choice, drawn, width,
        **constants, **tiles("sampling.draw"),
    )  # fmt: skip
    return drawn


def _specs() -> tuple[KernelSpec, ...]:
    penalties = {name: "*fp32" for name in ("LOGITS", "REPETITION", "PRESENCE", "FREQUENCY")}
    penalties |= {"PROMPT_MASK": "*i1", "OUTPUT_COUNTS": "*i32", "width": "i32"}
    draw = {name: "*fp32" for name in ("LOGITS", "TEMPERATURE", "TOP_P", "MIN_P")} | {"width": "i32"}
    draw |= {name: "*i64" for name in ("TOP_K", "SEED", "POSITION", "CHOICE", "DRAWN")}
    constants = {"GREEDY_BELOW": 1e-5, "PURPOSE": PURPOSE_SAMPLE}
    return (
        KernelSpec("sampling.penalties", penalties_kernel, penalties, {}, "sampling.penalties"),
        KernelSpec("sampling.draw", draw_kernel, draw, constants, "sampling.draw", divisible_by_16=("LOGITS", "width")),
        KernelSpec("sampling.draw.any_width", draw_kernel, draw, constants, "sampling.draw"),
    )


SPECS = _specs()
