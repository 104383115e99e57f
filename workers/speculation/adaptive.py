"""How many drafts pay: measured acceptance against the measured cost of a step.

A step takes those drafts, of all rows, that make it yield the most tokens a second. A draft's worth is the chance that
it and those before it are accepted: what the proposer says, corrected by what came of such sayings, or else, by the
row's own record, which begins with everybody's. Of a tree those drafts are taken that are worth most. A row whose
drafts are not worth their cost has none.

Where drafts cost nothing to make, those that are not taken are compared with what is drawn, too, so a row that turns
predictable is found at once. A proposer that takes time is only asked where its drafts would be worth that as well. A
row for which they are not sleeps, but is tried again with a few drafts after a while, which doubles with each failure.
All tries together may take a small share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.proposer import Drafts, IntArray, Proposer, ProposerAround
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
_MOSTLY = 0.5
_LEARN = 0.1
_NO_TOKEN = -1
_WORST = 3.0
"""Drafts that took longer than so many times what was expected count as if they had taken that."""


class AdaptiveProposer(ProposerAround):
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
        super().__init__(proposer)
        self._clock = clock
        self._costs = costs
        self._tree_depth = tree_depth
        self._levels = _Record(num_rows, _FIRST_GUESS)
        """Drafts accepted, of those that were tried: one more than were accepted, where there were more."""
        self._sayings = _Record(num_rows, _FIRST_SAYINGS)
        """Drafts accepted, of those that the proposer expected to be."""
        self._waited, self._wait = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._asleep: NDArray[np.bool_] = np.zeros(num_rows, bool)
        """Rows that are not asked until they have waited."""
        self._behind: NDArray[np.bool_] = np.ones(num_rows, bool)
        """Rows without drafts since they were admitted, or fell asleep: there is more to catch up with than usual."""
        self._num_rows = 0
        """Most rows of a step since a row fell asleep."""
        self._for_tries = 0.0
        """Seconds that tries may take."""
        self._depth, self._expected = np.zeros(num_rows, np.int64), np.zeros(num_rows)
        """Of the drafts of the step under way."""
        self._first = np.full(num_rows, _NO_TOKEN)
        """First draft of the step under way, taken or not, where making drafts is free."""
        self._first_worth = np.zeros(num_rows)
        self._level_seconds = _Seconds()
        """What each level of drafts costs."""
        self._catch_up_seconds = _Seconds()
        """What it costs that a proposer is asked at all, in steps that ask few rows which are behind."""
        self._seconds = 0.0
        """What the step's drafts cost."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._levels.forget(row)
        self._sayings.forget(row)
        self._waited[row], self._wait[row] = 0, _FIRST_WAIT
        self._asleep[row], self._behind[row] = False, True
        self._depth[row], self._first[row] = 0, _NO_TOKEN
        self._inner.admit(row, token_ids)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        self._depth[rows], self._expected[rows], self._seconds = 0, 0.0, 0.0
        if self._inner.is_free:
            drafts = self._ask_inner(rows, most)
            self._watch(rows, drafts)
            return self._trim(rows, drafts, np.zeros(len(rows), np.int64))
        most = self._of_those_awake(rows, most)
        if not most.any():
            return Drafts.none(len(rows))
        tries = self._to_try(rows, most)
        drafts, asked = self._ask(rows, most, tries)
        # A row that had to be asked and has no drafts (it catches up, perhaps) is not one that is not worth it.
        offered = np.where(asked > 0, drafts.num, most)
        drafts = self._trim(rows, drafts, tries)
        took = drafts.num > 0
        self._waited[rows[took]] = 0
        if offered.any():
            left_out = rows[(offered > 0) & ~took]
            self._asleep[left_out] = self._behind[left_out] = True
            self._num_rows = max(self._num_rows, len(rows))
        return drafts

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        self._inner.accept(rows, tokens, counts)
        drafted = self._depth[rows] > 0
        if drafted.any():
            self._learn(rows[drafted], counts[drafted] - 1)
        if self._inner.is_free:
            watched = ~drafted & (self._first[rows] != _NO_TOKEN) & (counts > 0)
            if watched.any():
                self._learn_unseen(rows[watched], tokens[watched, 0])
            self._first[rows] = _NO_TOKEN

    def step_took(self, num_tokens: int, seconds: float) -> None:
        self._costs.observe(num_tokens, max(seconds - self._seconds, seconds / 2))
        self._inner.step_took(num_tokens, seconds)

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
        num = self._that_pay(worth, levels, self._level_seconds.mean, self._catch_up_seconds.mean) + tries
        asked = np.minimum(num, levels) if self._tree_depth is None else np.where(num > 0, most, 0)
        if not asked.any():
            return Drafts.none(len(rows)), asked
        began = self._clock()
        self._inner.catch_up(rows[asked > 0])
        caught_up = self._clock()
        drafts = self._inner.propose(rows, asked)
        ended = self._clock()
        self._seconds = ended - began
        deepest = int(np.minimum(asked, levels).max())
        expected = self._catch_up_seconds.mean + self._level_seconds.mean * deepest
        if drafts.num.any():
            self._level_seconds.learn((ended - caught_up) / deepest)
        # Those behind take longer, once. Where even that was shorter than what is known, what is known is wrong.
        usual = self._behind[rows[asked > 0]].mean() < _MOSTLY
        if usual or caught_up - began < self._catch_up_seconds.mean:
            self._catch_up_seconds.learn(caught_up - began)
        if tries.any():
            # Not all of what a stall took: there would be no tries for a hundred times as long.
            seconds = min(self._seconds, expected * _WORST)
            self._for_tries -= seconds * float(tries[asked > 0].sum() / num[asked > 0].sum())
        self._behind[rows[drafts.num > 0]] = False
        return drafts, asked

    def _trim(self, rows: IntArray, drafts: Drafts, tries: IntArray) -> Drafts:
        """Those that make the step yield the most."""
        if not drafts.num.any():
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

    def _that_pay(
        self, worth: FloatArray, num: IntArray, level_seconds: float = 0.0, any_seconds: float = 0.0
    ) -> IntArray:
        """[D]: how many of each entry's drafts the best step takes, those that are worth most.

        worth [D, K], num [D]: 0 beyond an entry's drafts. Drafts that are still to be made, in chains along which worth
        falls, take any_seconds, and level_seconds for each level.
        """
        num_rows, width = worth.shape
        if not num.any():
            return np.zeros(num_rows, np.int64)
        order = np.argsort(-worth, axis=None, kind="stable")[: int(num.sum())]
        tokens = num_rows + np.concatenate(([0.0], worth.reshape(-1)[order].cumsum()))
        cost = self._costs.of(num_rows + np.arange(len(tokens)))
        if level_seconds or any_seconds:
            cost[1:] += any_seconds + level_seconds * np.maximum.accumulate(order % width + 1)
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
            cost = max(longer - step, step * _TRY_SHARE)
            making = self._level_seconds.mean * _TRY_DRAFTS
            due = due[np.argsort(-self._waited[rows[due]], kind="stable")][: 1 + int(self._for_tries / (cost + making))]
            tries[due] = _TRY_DRAFTS
            self._for_tries -= len(due) * cost  # making them is counted when they are made
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

    def _watch(self, rows: IntArray, drafts: Drafts) -> None:
        """Remember first drafts, to compare them with what is drawn."""
        if not drafts.num.any():
            return
        self._first[rows] = np.where(drafts.num > 0, drafts.tokens[:, 0], _NO_TOKEN)
        if drafts.worth is not None:
            self._first_worth[rows] = drafts.worth[:, 0]

    def _learn_unseen(self, rows: IntArray, drawn: IntArray) -> None:
        """Of first drafts that were not taken."""
        hit = (self._first[rows] == drawn).astype(np.int64)
        self._levels.learn(rows, hit, np.ones(len(rows), np.int64))
        if (expected := self._first_worth[rows]).any():
            self._sayings.learn(rows, hit, expected)


class _Seconds:
    """A running mean; the first time takes longer than any other, and is not counted."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._num = 0

    def learn(self, seconds: float) -> None:
        self._num += 1
        if self._num == 2:
            self.mean = seconds
        elif self._num > 2:
            self.mean += (min(seconds, self.mean * _WORST) - self.mean) * _LEARN


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
