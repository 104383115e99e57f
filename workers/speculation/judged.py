"""`Judged`: a proposer, and what came of its drafts, of each row's and of all.

A draft's worth is the chance that it and those before it are accepted: what the proposer says, corrected by what came
of such sayings, or else by the row's own record, which begins with everybody's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.proposer import Drafts, IntArray, Proposer
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
_NO_TOKEN = -1


class Judged:
    def __init__(self, proposer: Proposer, num_rows: int) -> None:
        self.proposer = proposer
        self._levels = _Record(num_rows, _FIRST_GUESS)
        """Drafts accepted, of those that were tried: one more than were accepted, where there were more."""
        self._sayings = _Record(num_rows, _FIRST_SAYINGS)
        """Drafts accepted, of those that the proposer expected to be."""
        self._depth, self._expected = np.zeros(num_rows, np.int64), np.zeros(num_rows)
        """Of the drafts of the step under way."""
        self._first = np.full(num_rows, _NO_TOKEN)
        """First draft of the step under way, taken or not, where making drafts is free."""
        self._first_worth = np.zeros(num_rows)

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._levels.forget(row)
        self._sayings.forget(row)
        self._depth[row], self._first[row] = 0, _NO_TOKEN
        self.proposer.admit(row, token_ids)

    def begin(self, rows: IntArray) -> None:
        """A step begins, with no drafts so far."""
        self._depth[rows], self._expected[rows] = 0, 0.0

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        """As a proposer that is free does. Its first drafts are compared with what is drawn, taken or not."""
        self.proposer.catch_up(rows[most > 0])
        drafts = self.proposer.propose(rows, most)
        if drafts.num.any():
            self._first[rows] = np.where(drafts.num > 0, drafts.tokens[:, 0], _NO_TOKEN)
            if drafts.worth is not None:
                self._first_worth[rows] = drafts.worth[:, 0]
        return drafts

    def acceptance(self, rows: IntArray) -> FloatArray:
        """[R]: the chance that a draft is accepted when those before it were."""
        return self._levels.share(rows)

    def judge(self, rows: IntArray, drafts: Drafts) -> Drafts:
        """With what each is worth by its record, 0 where there is none."""
        there = np.arange(drafts.tokens.shape[1]) < drafts.num[:, None]
        if drafts.worth is not None:
            worth = np.minimum(drafts.worth * self._sayings.share(rows)[:, None], 1.0)
        else:
            chance = self.acceptance(rows)[:, None]
            worth = chance ** depths(drafts.follows)[:, 1:]
            if drafts.parents is not None:
                # The second child counts where the first one was wrong, and so on.
                worth *= (1 - chance) ** ranks(drafts.parents)
        return replace(drafts, worth=np.where(there, worth, 0.0))

    def take(self, rows: IntArray, drafts: Drafts, kept: NDArray[np.bool_]) -> None:
        """Of its drafts, as it proposed them, those of kept [D, K] are used."""
        if not kept.any():
            return
        self._depth[rows] = np.where(kept, depths(drafts.follows)[:, 1:], 0).max(1)
        if drafts.worth is not None:
            self._expected[rows] = np.where(kept, drafts.worth, 0.0).sum(1)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """As `Proposer.accept`; returns the rows whose drafts were used, and whether that was right."""
        self.proposer.accept(rows, tokens, counts)
        used = self._depth[rows] > 0
        right = self._learn(rows[used], counts[used] - 1) if used.any() else used[used]
        unseen = ~used & (self._first[rows] != _NO_TOKEN) & (counts > 0)
        if unseen.any():
            self._learn_unseen(rows[unseen], tokens[unseen, 0])
        self._first[rows] = _NO_TOKEN
        return rows[used], right

    def _learn(self, rows: IntArray, accepted: IntArray) -> NDArray[np.bool_]:
        depth = self._depth[rows]
        accepted = np.minimum(accepted, depth)  # somebody else may have added to the drafts
        self._levels.learn(rows, accepted, np.minimum(accepted + 1, depth))
        right = accepted == depth
        if (expected := self._expected[rows]).any():
            self._sayings.learn(rows, accepted, expected)
            self._expected[rows] = 0.0
            # Who says what drafts are worth has most of a tree for nothing, and still is right.
            right |= (expected > 0) & (accepted > 0)
        return right

    def _learn_unseen(self, rows: IntArray, drawn: IntArray) -> None:
        """Of first drafts that were not taken."""
        hit = (self._first[rows] == drawn).astype(np.int64)
        self._levels.learn(rows, hit, np.ones(len(rows), np.int64))
        if (expected := self._first_worth[rows]).any():
            self._sayings.learn(rows, hit, expected)


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
