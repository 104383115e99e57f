"""How many drafts pay: measured acceptance against the measured cost of a step.

A step takes those drafts, of all rows, that make it yield the most tokens a second. A draft's worth is the chance that
it and those before it are accepted: what the proposer says, corrected by what came of such sayings, or else, by the
row's own record, which begins with everybody's. Of a tree those drafts are taken that are worth most. A row whose
drafts are not worth their cost is not asked for any, but is tried again with a few after a while, which doubles with
each failure. All tries together may take a small share of the time.

A proposer that takes time is only asked where its drafts would be worth that, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from slipring.workers.batch import Batch
    from slipring.workers.entries import Entries
    from slipring.workers.speculation.verify import Runs

from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer, Proposer
from slipring.workers.speculation.step_costs import StepCosts
from slipring.workers.speculation.tree import depths, ranks

FloatArray = NDArray[np.float64]

_KEEP = 0.9
"""Weight of what a row's record held before each step with drafts."""
_KEEP_OVERALL = 0.995
_PRIOR_TRIALS = 2.0
"""Drafts of its own after which a row's record weighs as much as everybody's."""
_FIRST_GUESS = (6.0, 10.0)
"""Accepted drafts and trials that the overall record begins with."""
_FIRST_SAYINGS = (4.0, 5.0)
"""Accepted drafts, and how many the proposer had expected, likewise."""
_TRY_DRAFTS = 2
_FIRST_WAIT, _LONGEST_WAIT = 4, 64
"""Steps without drafts before a row is tried again."""
_TRY_SHARE, _MOST_SAVED = 0.01, 0.1
"""Time for tries: as a share of all, and how much of it is kept for later, as a share of a step."""
_FEWER = 0.75
"""A step with so many rows for each that there was asks all rows again: drafts are cheaper now."""
_LEARN = 0.1
_WORST = 3.0
"""Drafts that took longer than so many times what was expected count as if they had taken that."""


class AdaptiveProposer(NullProposer):
    """A proposer's drafts, as many as pay."""

    def __init__(
        self,
        proposer: Proposer,
        costs: StepCosts,
        num_rows: int,
        tree_depth: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tree_depth`: most drafts that follow each other where they branch; None: chains."""
        self._clock = clock
        self._proposer = proposer
        self._costs = costs
        self._tree_depth = tree_depth
        self._levels = _Record(num_rows, _FIRST_GUESS)
        """Drafts accepted, of those that were tried: one more than were accepted, where there were more."""
        self._sayings = _Record(num_rows, _FIRST_SAYINGS)
        """Drafts accepted, of those that the proposer expected to be."""
        self._waited, self._wait = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._asleep: NDArray[np.bool_] = np.zeros(num_rows, bool)
        """Rows that are not asked until they have waited."""
        self._num_rows = 0
        """Most rows of a step since a row fell asleep."""
        self._for_tries = 0.0
        """Seconds that tries may take."""
        self._depth, self._expected = np.zeros(num_rows, np.int64), np.zeros(num_rows)
        """Of the drafts of the step under way."""
        self._level_seconds: float | None = None
        """What each level of drafts costs; None: not known yet."""
        self._seconds = 0.0
        """What the step's drafts cost."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._levels.forget(row)
        self._sayings.forget(row)
        self._waited[row], self._wait[row] = 0, _FIRST_WAIT
        self._asleep[row] = False
        self._depth[row] = 0
        self._proposer.admit(row, token_ids)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        most = self._of_those_awake(rows, most)
        if not most.any():
            self._depth[rows], self._seconds = 0, 0.0
            return Drafts.none(len(rows))
        if self._proposer.is_free:
            drafts = self._proposer.propose(rows, most)
            offered = drafts.num
            tries = self._to_try(rows, offered)
        else:
            tries = self._to_try(rows, most)
            drafts, asked = self._ask(rows, most, tries)
            # A row that had to be asked and has no drafts (it catches up, perhaps) is not one that is not worth it.
            offered = np.where(asked > 0, drafts.num, most)
        if not offered.any():
            self._depth[rows] = 0
            return drafts
        drafts = self._trim(rows, drafts, tries)
        took = drafts.num > 0
        self._waited[rows[took]] = 0
        self._asleep[rows[(offered > 0) & ~took]] = True
        self._num_rows = max(self._num_rows, len(rows))
        return drafts

    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        self._proposer.saw(entries, batch, hidden, runs)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        self._proposer.accept(rows, tokens, counts)
        drafted = self._depth[rows] > 0
        if drafted.any():
            self._learn(rows[drafted], counts[drafted] - 1)

    def step_took(self, num_tokens: int, seconds: float) -> None:
        self._costs.observe(num_tokens, max(seconds - self._seconds, seconds / 2))
        self._proposer.step_took(num_tokens, seconds)

    def overwritten(self, blocks: IntArray) -> None:
        self._proposer.overwritten(blocks)

    def acceptance(self, rows: IntArray) -> FloatArray:
        """[R]: the chance that a draft is accepted when those before it were."""
        return self._levels.share(rows)

    def _of_those_awake(self, rows: IntArray, most: IntArray) -> IntArray:
        """`most`, but 0 for rows that wait."""
        step = self._costs.at(len(rows))
        self._for_tries = min(self._for_tries + step * _TRY_SHARE, step * _MOST_SAVED)
        asleep = self._asleep[rows]
        if not asleep.any():
            return most
        if len(rows) < self._num_rows * _FEWER:
            self._asleep[:], self._num_rows = False, 0
            return most
        self._waited[rows] += asleep
        if self._for_tries > 0:
            asleep &= self._waited[rows] < self._wait[rows]
            self._asleep[rows] = asleep
        return np.where(asleep, 0, most)

    def _ask(self, rows: IntArray, most: IntArray, tries: IntArray) -> tuple[Drafts, IntArray]:
        """What a proposer drafts that takes time, and how many it was asked for: of the rows that are worth it."""
        levels = most if self._tree_depth is None else np.minimum(most, self._tree_depth)
        place = np.arange(int(levels.max(initial=0)))
        worth = self.acceptance(rows)[:, None] ** (place + 1)
        worth[place >= levels[:, None]] = 0.0
        num = self._that_pay(worth, levels, self._level_seconds or 0.0) + tries
        asked = np.minimum(num, levels) if self._tree_depth is None else np.where(num > 0, most, 0)
        began = self._clock()
        drafts = self._proposer.propose(rows, asked)
        self._seconds = self._clock() - began
        if drafts.num.any():
            self._learn_seconds(self._seconds / int(np.minimum(asked, levels).max()))
        return drafts, asked

    def _trim(self, rows: IntArray, drafts: Drafts, tries: IntArray) -> Drafts:
        """Those that make the step yield the most."""
        if not drafts.num.any():
            self._depth[rows] = 0
            return drafts
        of_tokens = depths(drafts.follows)[:, 1:]
        there = np.arange(of_tokens.shape[1]) < drafts.num[:, None]
        worth = np.where(there, self._worth(rows, drafts, of_tokens), 0.0)
        num = self._that_pay(worth, drafts.num) + tries
        # A draft is worth no more than the one it follows, so the best ones are a tree.
        kept = there & (np.argsort(np.argsort(-worth, 1, kind="stable"), 1) < num[:, None])
        self._depth[rows] = np.where(kept, of_tokens, 0).max(1)
        if drafts.worth is not None:
            self._expected[rows] = np.where(kept, drafts.worth, 0.0).sum(1)
        return drafts.keep(kept)

    def _worth(self, rows: IntArray, drafts: Drafts, of_tokens: IntArray) -> FloatArray:
        """[D, K]: of each draft."""
        if drafts.worth is not None:
            return np.minimum(drafts.worth * self._sayings.share(rows)[:, None], 1.0)
        chance = self.acceptance(rows)[:, None]
        worth = chance**of_tokens
        if drafts.parents is not None:
            # The second child counts where the first one was wrong, and so on.
            worth *= (1 - chance) ** ranks(drafts.parents)
        return worth

    def _that_pay(self, worth: FloatArray, num: IntArray, level_seconds: float = 0.0) -> IntArray:
        """[D]: how many of each entry's drafts the best step takes, those that are worth most.

        worth [D, K], num [D]: 0 beyond an entry's drafts. With level_seconds, worth falls along chains that are still
        to be drafted.
        """
        num_rows, width = worth.shape
        if not num.any():
            return np.zeros(num_rows, np.int64)
        order = np.argsort(-worth, axis=None, kind="stable")[: int(num.sum())]
        tokens = num_rows + np.concatenate(([0.0], worth.reshape(-1)[order].cumsum()))
        cost = self._costs.of(num_rows + np.arange(len(tokens)))
        if level_seconds:
            cost[1:] += level_seconds * np.maximum.accumulate(order % width + 1)
        best = int((tokens / cost).argmax())
        return np.bincount(order[:best] // width, minlength=num_rows)

    def _to_try(self, rows: IntArray, num: IntArray) -> IntArray:
        """[D]: drafts for rows that have waited for long enough, those first that have waited longest."""
        tries = np.zeros(len(rows), np.int64)
        if self._for_tries <= 0:
            return tries
        due = np.flatnonzero((num > 0) & (self._waited[rows] >= self._wait[rows]))
        if len(due):
            step, longer = self._costs.at(len(rows)), self._costs.at(len(rows) + _TRY_DRAFTS)
            cost = max(longer - step, step * _TRY_SHARE) + (self._level_seconds or 0.0) * _TRY_DRAFTS
            due = due[np.argsort(-self._waited[rows[due]], kind="stable")][: 1 + int(self._for_tries / cost)]
            tries[due] = _TRY_DRAFTS
            self._for_tries -= len(due) * cost
        return tries

    def _learn(self, rows: IntArray, accepted: IntArray) -> None:
        depth = self._depth[rows]
        accepted = np.minimum(accepted, depth)  # somebody else may have added to the drafts
        self._levels.learn(rows, accepted, np.minimum(accepted + 1, depth))
        right = accepted == depth
        if (expected := self._expected[rows]).any():
            self._sayings.learn(rows, accepted, expected)
            self._expected[rows] = 0.0
            # Who says what drafts are worth has most of a tree for nothing, and still is right.
            right |= (expected > 0) & (accepted > 0)
        longer = np.minimum(self._wait[rows] * 2, _LONGEST_WAIT)
        self._wait[rows] = np.where(right, _FIRST_WAIT, longer)

    def _learn_seconds(self, seconds: float) -> None:
        if self._level_seconds is None:
            self._level_seconds = 0.0  # the first time takes longer than any other
        elif self._level_seconds == 0.0:
            self._level_seconds = seconds
        else:
            self._level_seconds += (min(seconds, self._level_seconds * _WORST) - self._level_seconds) * _LEARN


class _Record:
    """Of each row and of all: hits among what was expected, later ones weighing more."""

    def __init__(self, num_rows: int, first: tuple[float, float]) -> None:
        self._hits, self._of = np.zeros(num_rows), np.zeros(num_rows)
        self._overall = np.array(first)

    def forget(self, row: int) -> None:
        self._hits[row] = self._of[row] = 0.0

    def share(self, rows: IntArray) -> FloatArray:
        """[R]"""
        overall = self._overall[0] / self._overall[1]
        return (self._hits[rows] + _PRIOR_TRIALS * overall) / (self._of[rows] + _PRIOR_TRIALS)

    def learn(self, rows: IntArray, hits: IntArray, of: IntArray | FloatArray) -> None:
        """hits, of [R], of one step."""
        self._hits[rows] = self._hits[rows] * _KEEP + hits
        self._of[rows] = self._of[rows] * _KEEP + of
        self._overall = self._overall * _KEEP_OVERALL + (hits.sum(), of.sum())
