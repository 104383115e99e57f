"""Which of a step's draws count: at each place the target's own token, for as long as the drafts before it were right.

The rule is the design's: no draft is ever drawn from, it is only compared with. So the tokens are those that would
have been drawn without drafts, at any temperature and for any number of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from slipring.kernels.spec_verify import verify_chain
from slipring.workers.entries import Entries
from slipring.workers.speculation.proposer import IntArray


@dataclass(frozen=True, slots=True)
class Runs:
    """What a step's entries have drawn, a run of tokens each."""

    tokens: IntArray
    """[E, W]: the first count[i] of a row."""
    count: IntArray
    """[E]"""
    failed: NDArray[np.bool_]
    """[E]: the logits were not finite at the entry's first draw."""
    kept: NDArray[np.bool_]
    """[S]: the draws that count, in the draws' order."""
    place: IntArray
    """[S]: each draw's place in its entry's run."""
    entry: IntArray
    """[S]: each draw's entry."""


def places(entries: Entries) -> tuple[IntArray, IntArray]:
    """The draws of a step, in order: (entry, place in the entry), [S] each."""
    entry = np.repeat(np.arange(len(entries.rows)), entries.num_draws)
    first = np.cumsum(entries.num_draws) - entries.num_draws
    return entry, np.arange(len(entry)) - first[entry]


def verify(entries: Entries, drawn: IntArray, ok: NDArray[np.bool_]) -> Runs:
    """drawn, ok [S]: the target's token at each place, and whether its logits were finite."""
    entry, place = places(entries)
    num_entries, width = len(entries.rows), 1 + entries.drafts.tokens.shape[1]
    tokens = np.full((num_entries, width), -1, np.int64)
    finite = np.zeros((num_entries, width), bool)
    tokens[entry, place], finite[entry, place] = drawn, ok
    count = np.minimum(entries.num_draws, 1)
    if width > 1:
        count[: entries.num_decode] += _accepted(entries, tokens)
    # A draft that made the logits overflow was wrong, whatever came after it.
    num_finite = finite.cumprod(1).sum(1)
    failed = (count > 0) & (num_finite == 0)
    count = np.minimum(count, num_finite)
    return Runs(tokens, count, failed, place < count[entry], place, entry)


def _accepted(entries: Entries, tokens: IntArray) -> IntArray:
    """[D]: leading drafts that equal the target's token."""
    drafts, num_decode = entries.drafts, entries.num_decode
    accepted, _ = verify_chain(
        torch.from_numpy(drafts.tokens),
        torch.from_numpy(tokens[:num_decode]),
        torch.from_numpy(drafts.num.astype(np.int32)),
    )
    return accepted.numpy().astype(np.int64)
