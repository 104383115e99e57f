"""Prompt lookup: the row's last few tokens have stood in it before, so what followed them then may follow them now.

A long prompt enters the row's index in slices, when the row is asked for drafts. Of the latest few places the one
whose past agrees with the row's for longest is copied from; where drafts may branch, the others too, as far as they
differ and there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        places = self._find(self._most)
        return copied(self.tokens, places[0], most) if places else []

    def propose_tree(self, most: int, depth: int) -> tuple[list[int], list[int]]:
        """At most `most` tokens that followed earlier occurrences, `depth` from each; those that begin alike share
        what they have in common: (tokens, parents as in `Drafts`)."""
        tokens, parents = list[int](), list[int]()
        children: dict[tuple[int, int], int] = {}
        for place in self._find(None):
            node = -1
            for token in copied(self.tokens, place, depth):
                if (node, token) not in children:
                    if len(tokens) == most:
                        return tokens, parents
                    children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[node, token]
        return tokens, parents

    def _find(self, enough: int | None) -> list[int]:
        """Places to copy from, those with the longest agreement first; the latest one alone that agrees for `enough`
        tokens, if one does."""
        if not self._places.enter(self._number, SLICE):
            return []
        found: list[tuple[int, int]] = []
        for place in self._places.find(self.tokens, self._most, _CANDIDATES):
            found.append((-place.length, place.at))
            if place.length == enough:
                return [place.at]
        return [at for _, at in sorted(found, key=lambda each: each[0])]


def copied(tokens: list[int], at: int, most: int) -> list[int]:
    """`most` tokens from `at` on; a copy that reaches the end goes round, as a repetition does."""
    found = tokens[at : at + most]
    period = len(tokens) - at
    while len(found) < most:
        found.append(found[len(found) - period])
    return found


class NgramProposer(NullProposer):
    """An index for each row that has one."""

    def __init__(self, num_rows: int, least: int, most: int, tree_depth: int | None = None) -> None:
        """`least`, `most`: sizes that are looked up; tree_depth None: chains, as long as is asked for."""
        self._sizes = least, most
        self._tree_depth = tree_depth
        self._index: list[NgramIndex | None] = [None] * num_rows

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._index[row] = NgramIndex(token_ids.tolist(), *self._sizes)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        for row, drawn, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            if (index := self._index[row]) is not None:
                index.tokens += drawn[:count]

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        parents = drafts.follows if self._tree_depth is None else drafts.follows.copy()
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            if count > 0 and (index := self._index[row]) is not None:
                if self._tree_depth is None:
                    found = index.propose(count)
                else:
                    found, hung = index.propose_tree(count, self._tree_depth)
                    parents[i, : len(hung)] = hung
                drafts.num[i] = len(found)
                drafts.tokens[i, : len(found)] = found
        return drafts if self._tree_depth is None else replace(drafts, parents=parents)
