"""How many drafts pay: measured acceptance against the measured cost of a step.

A step takes those drafts, of all rows, that make it yield the most tokens a second. A draft's worth is the chance that
it and those before it are accepted, by the row's own record, which begins with everybody's. A row whose drafts are
not worth their cost gets none, but is tried again with a few after a while, which doubles with each failure.
"""

from __future__ import annotations

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

_KEEP = 0.9
"""Weight of what a row's record held before each step with drafts."""
_KEEP_OVERALL = 0.995
_PRIOR_TRIALS = 2.0
"""Drafts of its own after which a row's record weighs as much as everybody's."""
_FIRST_GUESS = (6.0, 10.0)
"""Accepted drafts and trials that the overall record begins with."""
_TRY_DRAFTS = 2
_FIRST_WAIT, _LONGEST_WAIT = 4, 64
"""Steps without drafts before a row is tried again."""


class AdaptiveProposer(NullProposer):
    """A proposer's drafts, as many as pay."""

    def __init__(self, proposer: Proposer, costs: StepCosts, num_rows: int) -> None:
        self._proposer = proposer
        self._costs = costs
        self._accepted, self._trials = np.zeros(num_rows), np.zeros(num_rows)
        self._overall = np.array(_FIRST_GUESS)
        self._waited, self._wait = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._num_drafts = np.zeros(num_rows, np.int64)
        """Of the step under way."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._accepted[row] = self._trials[row] = 0.0
        self._waited[row], self._wait[row] = 0, _FIRST_WAIT
        self._num_drafts[row] = 0
        self._proposer.admit(row, token_ids)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        if self._proposer.is_free:
            drafts = self._proposer.propose(rows, most)
            drafts = drafts.first(self._worth_it(rows, drafts.num))
        else:
            drafts = self._proposer.propose(rows, self._worth_it(rows, most))
        self._num_drafts[rows] = drafts.num
        return drafts

    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        self._proposer.saw(entries, batch, hidden, runs)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        self._proposer.accept(rows, tokens, counts)
        drafted = self._num_drafts[rows] > 0
        if drafted.any():
            self._learn(rows[drafted], counts[drafted] - 1)

    def step_took(self, num_tokens: int, seconds: float) -> None:
        self._costs.observe(num_tokens, seconds)
        self._proposer.step_took(num_tokens, seconds)

    def acceptance(self, rows: IntArray) -> NDArray[np.float64]:
        """[R]: the chance that a draft is accepted when those before it were."""
        overall = self._overall[0] / self._overall[1]
        return (self._accepted[rows] + _PRIOR_TRIALS * overall) / (self._trials[rows] + _PRIOR_TRIALS)

    def _worth_it(self, rows: IntArray, offered: IntArray) -> IntArray:
        """[D]: how many of the offered drafts are taken."""
        if not offered.any():
            return offered
        taken = np.minimum(offered, self._that_pay(rows, offered) + self._to_try(rows, offered))
        self._count_waits(rows, offered, taken)
        return taken

    def _that_pay(self, rows: IntArray, num: IntArray) -> IntArray:
        """[D]: how many of each entry's drafts the best step takes."""
        place = np.arange(int(num.max()))
        worth = self.acceptance(rows)[:, None] ** (place + 1)
        worth[place >= num[:, None]] = 0.0
        order = np.argsort(-worth, axis=None, kind="stable")[: int(num.sum())]
        tokens = len(rows) + np.concatenate(([0.0], worth.reshape(-1)[order].cumsum()))
        cost = self._costs.of(len(rows) + np.arange(len(tokens)))
        best = int((tokens / cost).argmax())
        # Worth falls along a chain, so what is taken of it is its beginning.
        return np.bincount(order[:best] // len(place), minlength=len(rows))

    def _to_try(self, rows: IntArray, num: IntArray) -> IntArray:
        """[D]: drafts for rows that have waited for long enough."""
        return np.where((num > 0) & (self._waited[rows] >= self._wait[rows]), _TRY_DRAFTS, 0)

    def _count_waits(self, rows: IntArray, offered: IntArray, taken: IntArray) -> None:
        self._waited[rows] = np.where(taken > 0, 0, self._waited[rows] + (offered > 0))

    def _learn(self, rows: IntArray, accepted: IntArray) -> None:
        trials = np.minimum(accepted + 1, self._num_drafts[rows])
        self._accepted[rows] = self._accepted[rows] * _KEEP + accepted
        self._trials[rows] = self._trials[rows] * _KEEP + trials
        self._overall = self._overall * _KEEP_OVERALL + (accepted.sum(), trials.sum())
        longer = np.minimum(self._wait[rows] * 2, _LONGEST_WAIT)
        self._wait[rows] = np.where(accepted == self._num_drafts[rows], _FIRST_WAIT, longer)
