"""What a step draws: from each entry's last token on, the target's own tokens for as long as its drafts hold them.

The rule is the design's: no draft is ever drawn from, it is only compared with. A row draws its next token as it would
without drafts; where one of the drafts equals it, the target has been computed behind it, so the row draws again
there. So the tokens are those that would have been drawn without drafts, at any temperature and for any tree, and
nothing is drawn where no walk comes by.

Under rejection sampling a draft that was drawn itself stands in the place of such a draw, or is turned down for one
from what it leaves (`kernels/rejection.py`). For any other draft the rule above is the same as rejection sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.workers.entries import Entries
from slipring.workers.sampler import DrawnDrafts, Draws, Logprobs, Places
from slipring.workers.speculation.proposer import Drafts, IntArray


class Draw(Protocol):
    """The part of the `Sampler` that a walk needs."""

    def sample(self, logits: Tensor, places: Places) -> Draws: ...

    def count(self, rows: IntArray, tokens: IntArray) -> None: ...


@dataclass(frozen=True, slots=True)
class RunLogprobs:
    """Log-probabilities of some tokens that all stand at one place of their runs."""

    entry: IntArray
    """[L]"""
    place: int
    logprobs: Logprobs
    kept: NDArray[np.bool_]
    """[L]: the token counts."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What a step's entries have drawn, a run of tokens each: accepted drafts, and one token more."""

    tokens: IntArray
    """[E, W]: the first count[i] of a row."""
    count: IntArray
    """[E]"""
    path: IntArray
    """[E, W]: which of the entry's tokens each one was drawn behind: 0 for its last one (or a prompt's end), 1 + i for
    its draft i."""
    failure: IntArray
    """[E]: why nothing could be drawn at the entry's first draw, as in `Draws`; 0 where something was."""
    logprobs: list[RunLogprobs]

    @property
    def detours(self) -> tuple[IntArray, IntArray, IntArray]:
        """Accepted drafts that do not lie right behind the token that they follow, [n] each: (entry, 0 for the entry's
        last token or 1 + i for its draft i, its place in a chain)."""
        place = np.arange(self.path.shape[1])
        entry, at = np.nonzero((place < self.count[:, None]) & (self.path != place))
        return entry, self.path[entry, at], at


def verify(entries: Entries, logits: Tensor, num_outputs: IntArray, sampler: Draw) -> Runs:
    """logits [S, V]: behind each token that can be drawn after, in the entries' order; num_outputs [E]: of the rows.

    Draws, and tells `sampler.count` what was drawn. May overwrite the logits.
    """
    num_entries, drafts = len(entries.rows), entries.drafts
    width = 1 + (drafts.tokens.shape[1] if drafts.num.any() else 0)
    runs = Runs(
        np.full((num_entries, width), -1, np.int64),
        np.zeros(num_entries, np.int64),
        np.zeros((num_entries, width), np.int64),
        np.zeros(num_entries, np.int64),
        [],
    )
    first = np.cumsum(entries.num_draws) - entries.num_draws
    begin = entries.end - entries.num_draws
    at = np.flatnonzero(entries.num_draws)
    token = np.zeros(len(at), np.int64)
    for step in range(width):
        rows, index = entries.rows[at], first[at] + token
        drawn = None if drafts.proposals is None else _drawn_behind(drafts, at, token)
        places = Places(rows, begin[at] + step + 1, num_outputs[at] + step, token, drawn)
        draws = sampler.sample(_take(logits, index), places)
        runs.path[at, step] = token
        if draws.logprobs is not None:
            of = draws.logprobs.at
            runs.logprobs.append(RunLogprobs(at[of], step, draws.logprobs, draws.ok[of]))
        if not draws.ok.all():
            _note_failures(runs, at, step, draws)
        at, drawn = at[draws.ok], draws.tokens[draws.ok]
        runs.tokens[at, step] = drawn
        runs.count[at] += 1
        sampler.count(entries.rows[at], drawn)
        at, token = _descend(drafts, at, token[draws.ok], drawn)
        if not len(at):
            break
    return runs


def _take(logits: Tensor, index: IntArray) -> Tensor:
    """Rows `index`, which rises; not copied where they stand together, as those of a single stream do."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return logits[int(index[0]) : int(index[-1]) + 1]
    return logits.index_select(0, torch.from_numpy(index))


def _drawn_behind(drafts: Drafts, at: IntArray, token: IntArray) -> DrawnDrafts | None:
    """Of the entries `at`: the drafts of chains that stand behind these of their tokens, [n] all."""
    assert drafts.proposals is not None and drafts.parents is None
    behind = np.flatnonzero(at < len(drafts.num))
    behind = behind[token[behind] < drafts.num[at[behind]]]
    proposals = drafts.proposals[at[behind], token[behind]]
    drawn = proposals["chance"].any(1)
    entry, draft = at[behind[drawn]], token[behind[drawn]]
    return DrawnDrafts(behind[drawn], drafts.tokens[entry, draft], proposals[drawn]) if drawn.any() else None


def _note_failures(runs: Runs, at: IntArray, step: int, draws: Draws) -> None:
    """A draft that made the logits overflow was wrong, whatever comes after it: only a first draw fails its entry."""
    if step == 0:
        runs.failure[at] = draws.failure
    # The matcher met its limits behind drafts that were right: the row's next step will say so.


def _descend(drafts: Drafts, at: IntArray, token: IntArray, drawn: IntArray) -> tuple[IntArray, IntArray]:
    """The entries among `at` of whose drafts one is right, and which of their tokens it is.

    `token`: the one that `drawn` was drawn behind, [n] all.
    """
    if not drafts.tokens.shape[1] or not len(at):
        return at[:0], token[:0]
    decode = at < len(drafts.num)
    at, token, drawn = at[decode], token[decode], drawn[decode]
    right = (drafts.tokens[at] == drawn[:, None]) & (drafts.follows[at] == token[:, None] - 1)
    right &= np.arange(right.shape[1]) < drafts.num[at, None]
    goes_on = right.any(1)
    return at[goes_on], right[goes_on].argmax(1) + 1
