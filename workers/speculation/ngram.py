"""Prompt lookup: the row's last few tokens have stood in it before, so what followed them then may follow them now.

Each row has an index from its n-grams of the least size to the places right after them, chained from the latest to
earlier ones. It grows by one entry with each token and is never rescanned; a long prompt enters it in slices, when the
row is asked for drafts. Of the latest few places the one whose past agrees with the row's for longest is copied from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer

_SLICE = 4096
"""Tokens that enter the index at once, in about a millisecond."""
_CANDIDATES = 8
"""Earlier places that are compared."""
_NOWHERE = -1


class NgramIndex:
    """The tokens of one sequence, and the places that follow each of its n-grams of size `least`."""

    def __init__(self, token_ids: Sequence[int], least: int, most: int) -> None:
        self.tokens = list(token_ids)
        self._least, self._most = least, most
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        """For each indexed place the one before it that follows the same n-gram."""

    def propose(self, most: int) -> list[int]:
        """`most` tokens that followed an earlier occurrence of the sequence's end; nothing where there is none."""
        tokens = self.tokens
        if not self._catch_up() or len(tokens) <= self._least:
            return []
        at = self._latest.get(tuple(tokens[-self._least :]), _NOWHERE)
        best, longest = _NOWHERE, 0
        for _ in range(_CANDIDATES):
            if at == _NOWHERE or longest == self._most:
                break
            if (length := self._agreement(at)) > longest:
                best, longest = at, length
            at = self._earlier[at]
        return [] if best == _NOWHERE else self._copy(best, most)

    def _agreement(self, at: int) -> int:
        """How many tokens before `at` equal the sequence's last ones, up to the most that is asked for."""
        tokens, length = self.tokens, self._least
        while length < min(self._most, at) and tokens[at - length - 1] == tokens[-length - 1]:
            length += 1
        return length

    def _copy(self, at: int, most: int) -> list[int]:
        """`most` tokens from `at` on; a copy that reaches the end goes round, as a repetition does."""
        found = self.tokens[at : at + most]
        period = len(self.tokens) - at
        while len(found) < most:
            found.append(found[len(found) - period])
        return found

    def _catch_up(self) -> bool:
        """Enter the places that hold a known token, a slice of them at most; whether all are entered."""
        tokens, latest, earlier, least = self.tokens, self._latest, self._earlier, self._least
        begin, end = len(earlier), min(len(self.tokens), len(earlier) + _SLICE)
        for at in range(begin, end):
            gram = tuple(tokens[at - least : at]) if at >= least else ()
            earlier.append(latest.get(gram, _NOWHERE) if gram else _NOWHERE)
            if gram:
                latest[gram] = at
        return end == len(tokens)


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
