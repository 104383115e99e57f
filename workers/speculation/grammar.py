"""Drafts that cannot be wrong: where a row's grammar leaves one token alone, that token is the next one.

They are computed with the others in one step instead of one step each. The target still draws at each of their
places, under a mask that allows nothing else, so log-probabilities, noise and positions are those without drafts.

Another proposer goes on from there. One that knows tokens alone is told them before the step, since they are certain;
one that needs hidden states drafts for the rows that have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipring.workers.constraints import Constraints
from slipring.workers.speculation.proposer import PROPOSAL, Drafts, IntArray, Proposer, ProposerAround


class GrammarProposer(ProposerAround):
    """What grammars force, then the drafts of another proposer."""

    def __init__(self, constraints: Constraints, inner: Proposer, told: Sequence[Proposer], num_rows: int) -> None:
        """`told`: those that `inner` asks for drafts, if all of them know tokens alone."""
        super().__init__(inner)
        self._constraints, self._knowing = constraints, told
        constraints.look_for_forced()
        self._told = np.zeros(num_rows, np.int64)
        """Forced tokens that the others know already, and that have not been drawn so far."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._told[row] = 0
        self._inner.admit(row, token_ids)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        if not self._constraints.any(rows):
            return self._ask_inner(rows, most)
        self._take_back(rows[self._told[rows] > 0])
        forced = self._constraints.forced(rows, most)
        if not forced.num.any():
            return self._ask_inner(rows, most)
        if not self._knowing:
            return _then(forced, self._ask_inner(rows, np.where(forced.num > 0, 0, most)))
        at = np.flatnonzero(forced.num)
        for each in self._knowing:
            each.accept(rows[at], forced.tokens[at], forced.num[at])
        self._told[rows[at]] = forced.num[at]
        return _then(forced, self._ask_inner(rows, most - forced.num))

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        told = self._told[rows]
        if told.any():
            going = counts > told
            self._told[rows[going]] = 0
            place = np.minimum(np.arange(tokens.shape[1]) + told[:, None], tokens.shape[1] - 1)
            tokens = np.take_along_axis(tokens, place, 1)
            rows, tokens, counts = rows[going], tokens[going], (counts - told)[going]
        self._inner.accept(rows, tokens, counts)

    def _take_back(self, rows: IntArray) -> None:
        """A draw behind a forced token failed, and the rows go on all the same: the others begin anew with them. Even
        where all that was told came, what they drafted behind it has not been judged."""
        for row in rows.tolist():
            self.admit(row, self._constraints.tokens(row))


def _then(first: Drafts, second: Drafts) -> Drafts:
    """Chains, each followed by whatever the other one has for its row."""
    num = first.num + second.num
    tokens = np.zeros((len(num), int(num.max(initial=0))), np.int64)
    place = np.arange(tokens.shape[1])
    parents = np.broadcast_to(place - 1, tokens.shape).copy()
    proposals = second.proposals
    if proposals is not None:
        proposals = np.zeros((*tokens.shape, proposals.shape[2]), PROPOSAL)
    for drafts, begin in ((first, np.zeros_like(num)), (second, first.num)):
        here = (place >= begin[:, None]) & (place < (begin + drafts.num)[:, None])
        there = np.arange(drafts.tokens.shape[1]) < drafts.num[:, None]
        tokens[here] = drafts.tokens[there]
        parents[here] = (drafts.follows + begin[:, None])[there]
        if proposals is not None and drafts.proposals is not None:
            proposals[here] = drafts.proposals[there]
    return Drafts(tokens, num, None if second.parents is None else parents, proposals=proposals)
