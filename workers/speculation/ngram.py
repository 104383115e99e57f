"""Prompt lookup: the row's last few tokens have stood in it before, so what followed them then may follow them now.

A long prompt enters the row's index in slices, when the row is asked for drafts. Of the latest few places the one
whose past agrees with the row's for longest is copied from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.occurrences import Occurrences
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer

SLICE = 4096
"""Tokens that enter an index at once, in a few milliseconds."""
_CANDIDATES = 8
"""Earlier places that are compared."""


class NgramIndex:
    """The tokens of one sequence, and the places that follow each of its n-grams of size `least`."""

    def __init__(self, token_ids: Sequence[int], least: int, most: int) -> None:
        self._places = Occurrences(least)
        self._number = self._places.begin(token_ids)
        self._most = most
        self.tokens = self._places.tokens(self._number)

    def propose(self, most: int) -> list[int]:
        """`most` tokens that followed an earlier occurrence of the sequence's end; nothing where there is none."""
        if not self._places.enter(self._number, SLICE):
            return []
        best, longest = -1, 0
        for place in self._places.find(self.tokens, self._most, _CANDIDATES):
            if place.length > longest:
                best, longest = place.at, place.length
            if longest == self._most:
                break
        return [] if best < 0 else copied(self.tokens, best, most)


def copied(tokens: list[int], at: int, most: int) -> list[int]:
    """`most` tokens from `at` on; a copy that reaches the end goes round, as a repetition does."""
    found = tokens[at : at + most]
    period = len(tokens) - at
    while len(found) < most:
        found.append(found[len(found) - period])
    return found


class NgramProposer(NullProposer):
    """An index for each row that has one."""

    def __init__(self, num_rows: int, least: int, most: int) -> None:
        self._sizes = least, most
        self._index: list[NgramIndex | None] = [None] * num_rows

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._index[row] = NgramIndex(token_ids.tolist(), *self._sizes)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        for row, drawn, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            if (index := self._index[row]) is not None:
                index.tokens += drawn[:count]

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            if count > 0 and (index := self._index[row]) is not None:
                found = index.propose(count)
                drafts.num[i] = len(found)
                drafts.tokens[i, : len(found)] = found
        return drafts
