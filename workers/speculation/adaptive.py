"""How many drafts pay: measured acceptance against the measured cost of a step.

A step takes those drafts, of all rows, that make it yield the most tokens a second, by what they are worth
(`judged.py`). Of a tree those drafts are taken that are worth most. A row whose drafts are not worth their cost has
none.

A proposer that takes time is only asked where its drafts would be worth that as well. A row for which they are not
sleeps, but is tried again with a few drafts after a while, which doubles with each failure. All tries together may take
a small share of the time. Beside it another one may stand whose drafts are free: a row takes these where they promise
as many tokens a second, or where it gets none from the proposer.

Where drafts cost nothing to make, those that are not taken are compared with what is drawn, too, so a row that turns
predictable is found at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.judged import FloatArray, Judged
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer, Proposer, ProposerAround
from slipring.workers.speculation.step_costs import StepCosts

_TRY_DRAFTS = 2
_FIRST_WAIT, _LONGEST_WAIT = 4, 64
"""Steps without drafts before a row is tried again."""
_TRY_SHARE, _MOST_SAVED = 0.01, 0.1
"""Time for tries: as a share of all, and how much of it is kept for later, as a share of a step."""
_FEWER = 0.75
"""A step with so many rows for each that there was asks all rows again: drafts are cheaper now."""
_MOSTLY = 0.5
_LEARN = 0.1
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
        free: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tree_depth`: most drafts that follow each other where they branch; None: chains. `free`: who looks up drafts
        beside a proposer that takes time, from a row's tokens alone."""
        super().__init__(proposer)
        null = NullProposer()
        self._free = Judged(proposer if proposer.is_free else free or null, num_rows)
        self._dear = Judged(null if proposer.is_free else proposer, num_rows)
        self._clock = clock
        self._costs = costs
        self._tree_depth = tree_depth
        self._waited, self._wait = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._asleep: NDArray[np.bool_] = np.zeros(num_rows, bool)
        """Rows that are not asked until they have waited."""
        self._behind: NDArray[np.bool_] = np.ones(num_rows, bool)
        """Rows without drafts since they were admitted, slept or took copies: they have more to catch up with."""
        self._num_rows = 0
        """Most rows of a step since a row fell asleep."""
        self._for_tries = 0.0
        """Seconds that tries may take."""
        self._level_seconds = _Seconds()
        """What each level of drafts costs."""
        self._catch_up_seconds = _Seconds()
        """What it costs that a proposer is asked at all, in steps that ask few rows which are behind."""
        self._seconds = 0.0
        """What the step's drafts cost."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._waited[row], self._wait[row] = 0, _FIRST_WAIT
        self._asleep[row], self._behind[row] = False, True
        for judged in (self._free, self._dear):
            judged.admit(row, token_ids)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        self._seconds = 0.0
        for judged in (self._free, self._dear):
            judged.begin(rows)
        found = self._free.propose(rows, most if self._inner.is_free else self._levels(most))
        copies = self._free.judge(rows, found)
        most = np.zeros_like(most) if self._inner.is_free else self._of_those_awake(rows, most)
        promised = self._promised(rows, most)
        copied = (most > 0) & (found.num > 0) & self._as_good(copies, most, promised)
        self._waited[rows] += copied  # or what its drafts are worth would never be found out again
        tries = self._to_try(rows, most)
        most = np.where(copied & (tries == 0), 0, most)
        self._behind[rows[most == 0]] = True
        drafts, asked = self._ask(rows, most, promised, tries) if most.any() else (Drafts.none(len(rows)), most)
        judged = self._dear.judge(rows, drafts)
        made = (drafts.num > 0) & ((tries > 0) | (_worth(judged) >= _worth(copies)))
        both = judged.of_those(made).or_else(copies)
        kept = self._kept(both, np.where(made, tries, 0))
        for which, own, its in ((self._dear, drafts, made), (self._free, found, ~made)):
            which.take(rows, own, kept[:, : own.tokens.shape[1]] & its[:, None])
        # A row that had to be asked and has no drafts (it catches up, perhaps) is not one that is not worth it.
        offered, took = np.where(asked > 0, made, most > 0), made & kept.any(1)
        self._waited[rows[took]] = 0
        if offered.any():
            self._asleep[rows[offered & ~took]] = True
            self._num_rows = max(self._num_rows, len(rows))
        return both.keep(kept)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        self._free.accept(rows, tokens, counts)
        asked, right = self._dear.accept(rows, tokens, counts)
        longer = np.minimum(self._wait[asked] * 2, _LONGEST_WAIT)
        self._wait[asked] = np.where(right, _FIRST_WAIT, longer)

    def step_took(self, num_tokens: int, seconds: float) -> None:
        self._costs.observe(num_tokens, max(seconds - self._seconds, seconds / 2))
        self._inner.step_took(num_tokens, seconds)

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

    def _promised(self, rows: IntArray, most: IntArray) -> FloatArray:
        """[R, K]: what drafts would be worth that are still to be made, as far as rows' records tell."""
        levels = self._levels(most)
        place = np.arange(int(levels.max(initial=0)))
        return np.where(place < levels[:, None], self._dear.acceptance(rows)[:, None] ** (place + 1), 0.0)

    def _as_good(self, copies: Drafts, most: IntArray, promised: FloatArray) -> NDArray[np.bool_]:
        """[R]: whether copies yield as many tokens a second as drafts that would have to be made. That takes no longer
        for a row more, if a row without copies asks for them anyway."""
        making, step = 0.0, self._costs.at(len(most))
        if not (most[copies.num == 0] > 0).any():
            levels = int((promised > 0).sum(1).max(initial=0))
            making = self._catch_up_seconds.mean + self._level_seconds.mean * levels
        return (1 + _worth(copies)) * (step + making) >= (1 + promised.sum(1)) * step

    def _levels(self, most: IntArray) -> IntArray:
        """[R]: drafts that follow each other, among so many."""
        return most if self._tree_depth is None else np.minimum(most, self._tree_depth)

    def _ask(self, rows: IntArray, most: IntArray, promised: FloatArray, tries: IntArray) -> tuple[Drafts, IntArray]:
        """What a proposer drafts that takes time, and how many it was asked for: of the rows that are worth it."""
        levels, worth = self._levels(most), np.where(most[:, None] > 0, promised, 0.0)
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

    def _kept(self, drafts: Drafts, tries: IntArray) -> NDArray[np.bool_]:
        """[D, K]: those that make the step yield the most."""
        assert drafts.worth is not None
        most = self._that_pay(drafts.worth, drafts.num) + tries
        # A draft is worth no more than the one it follows, so the best ones are a tree.
        rank = np.argsort(np.argsort(-drafts.worth, 1, kind="stable"), 1)
        return (rank < most[:, None]) & (np.arange(drafts.tokens.shape[1]) < drafts.num[:, None])

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


def _worth(drafts: Drafts) -> FloatArray:
    """[D]: of all of an entry's drafts; they have been judged."""
    assert drafts.worth is not None
    return drafts.worth.sum(1)
