"""A step's entries as this worker knows them: a StepInput's bounds replaced by its own row state.

Decode entries come first. Under speculation the engine does not know where a row stands until its last step is back,
so a decode entry's start and the number of its tokens are this worker's to say: the last token drawn, and as many
drafts as were made. An entry whose row has reached its limit in a step that the engine has not seen yet has no tokens.

Drafts lie in the cache one after the other behind the row's last token, whatever they follow (`speculation/tree.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipring.shm.wire import StepFlag, StepInputView
from slipring.workers.rows import Rows
from slipring.workers.speculation.proposer import Drafts
from slipring.workers.speculation.tree import Branches, branches_of

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entries:
    """E entries, D of them in decode."""

    rows: IntArray
    """[E]"""
    start: IntArray
    """[E]: first position computed."""
    num_tokens: IntArray
    """[E]: tokens computed; 0 only for a decode row beyond its limit."""
    num_decode: int
    drafts: Drafts
    """Of the decode entries."""
    num_draws: IntArray
    """[E]: tokens that can be drawn: after each of a decode entry, after the last one of a prompt, else none."""
    branches: Branches | None = None
    """Of the decode entries; None when all are chains."""
    absent: IntArray | None = None
    """[E]: positions of each entry's past that the cache does without: its tokens' places in the sequence are so much
    higher than `start` says. None: none."""

    @property
    def end(self) -> IntArray:
        return self.start + self.num_tokens


def tokens_of(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Of each token, entry by entry: (its entry, its place among the entry's counts[entry] [E])."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)


def known_start(step: StepInputView, rows: Rows) -> IntArray:
    """[E]: where each entry begins."""
    num_rows = int(step.header[step.NUM_ROWS])
    start = step.start[:num_rows].astype(np.int64)
    bounded = (step.flags[:num_rows] & StepFlag.UPPER_BOUND) != 0
    return np.where(bounded, rows.position[step.rows[:num_rows]], start)


def room_for_drafts(step: StepInputView, rows: Rows, start: IntArray) -> IntArray:
    """[D]: drafts that each decode entry may hold: none whose acceptance would pass the request's limit, even in a
    chain, because a row has blocks up to its limit only."""
    num_decode = int(step.header[step.NUM_DECODE])
    limit = rows.limit[step.rows[:num_decode]]
    return np.clip(limit - 2 - start[:num_decode], 0, step.num_draft[:num_decode]).astype(np.int64)


def entries_of(step: StepInputView, rows: Rows, start: IntArray, drafts: Drafts) -> Entries:
    num_rows, num_decode = int(step.header[step.NUM_ROWS]), int(step.header[step.NUM_DECODE])
    of_rows = step.rows[:num_rows].astype(np.int64)
    num_tokens = step.num_tokens[:num_rows].astype(np.int64)
    beyond = start[:num_decode] >= rows.limit[of_rows[:num_decode]] - 1
    num_tokens[:num_decode] = np.where(beyond, 0, 1 + drafts.num)
    num_draws = ((step.flags[:num_rows] & StepFlag.SAMPLE) != 0).astype(np.int64)
    num_draws[:num_decode] = num_tokens[:num_decode]
    branches = branches_of(start[:num_decode], drafts)
    return Entries(of_rows, start, num_tokens, num_decode, drafts, num_draws, branches)
