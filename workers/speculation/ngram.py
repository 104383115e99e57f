"""Prompt lookup: the row's last few tokens have stood in it before, so what followed them then may follow them now.

A long prompt enters the row's index in slices, when the row is asked for drafts. Of the latest few places the one
whose past agrees with the row's for longest is copied from; where drafts may branch, the others too, as far as they
differ and there is room. How far a draft can be trusted depends on how many tokens agree before it, and is counted:
two that agree say little, five a lot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.occurrences import Occurrences
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer

SLICE = 4096
"""Tokens that enter an index at once, in a few milliseconds."""
_CANDIDATES = 8
"""Earlier places that are compared."""
_PRIOR_TRIALS, _KEEP = 4.0, 0.995
"""Drafts that a first guess of a chance weighs as much as, and weight of earlier drafts beside each later one."""


class NgramIndex:
    """The tokens of one sequence, and the places that follow each of its n-grams of size `least`."""

    def __init__(self, token_ids: Sequence[int], least: int, most: int) -> None:
        self._places = Occurrences(least)
        self._number = self._places.begin(token_ids)
        self._most = most
        self.tokens = self._places.tokens(self._number)

    def propose(self, most: int) -> Copies:
        """`most` tokens that followed an earlier occurrence of the sequence's end; nothing where there is none."""
        copies = Copies()
        for place, length in self._find(self._most)[:1]:
            copies.add(copied(self.tokens, place, most), length, most)
        return copies

    def propose_tree(self, most: int, depth: int) -> Copies:
        """At most `most` tokens that followed earlier occurrences, `depth` from each."""
        copies = Copies()
        for place, length in self._find(None):
            copies.add(copied(self.tokens, place, depth), length, most)
        return copies

    def _find(self, enough: int | None) -> list[tuple[int, int]]:
        """Places to copy from, and how many tokens agree before each, the longest agreement first; the latest one alone
        that agrees for `enough` tokens, if one does."""
        if not self._places.enter(self._number, SLICE):
            return []
        found: list[tuple[int, int]] = []
        for place in self._places.find(self.tokens, self._most, _CANDIDATES):
            found.append((place.at, place.length))
            if place.length == enough:
                return found[-1:]
        return sorted(found, key=lambda each: -each[1])


@dataclass(slots=True)
class Copies:
    """Drafts of one row. Those that begin alike share what they have in common."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """As in `Drafts`."""
    agreed: list[int] = field(default_factory=list)
    """Tokens that agree before each, drafts on its path included."""
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tokens: list[int], length: int, most: int) -> None:
        """Another copy, before which so many tokens agree; no more than `most` drafts in all."""
        node = -1
        for place, token in enumerate(tokens):
            if (node, token) not in self._children:
                if len(self.tokens) == most:
                    return
                self._children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.agreed.append(length + place)
            node = self._children[node, token]


class Agreements:
    """How often a draft was right, by the number of tokens that agree before it."""

    def __init__(self, most: int) -> None:
        """`most`: more than so many are like so many."""
        first = [length / (length + 1) for length in range(most + 1)]
        self._hits, self._of = [_PRIOR_TRIALS * chance for chance in first], [_PRIOR_TRIALS] * (most + 1)
        self._most = most

    def worth(self, copies: Copies) -> list[float]:
        """The chance of each that it is accepted: with those that it follows, and instead of those beside it."""
        worth, left = list[float](), [1.0] * (len(copies.tokens) + 1)
        for parent, agreed in zip(copies.parents, copies.agreed, strict=True):
            at = min(agreed, self._most)
            chance = self._hits[at] / self._of[at]
            worth.append((worth[parent] if parent >= 0 else 1.0) * left[parent + 1] * chance)
            left[parent + 1] *= 1.0 - chance
        return worth

    def learn(self, copies: Copies, drawn: list[int]) -> None:
        """These tokens came. Drafts are judged as far as they and the tokens go together."""
        node, depth = -1, 0
        for draft, (token, parent, agreed) in enumerate(zip(copies.tokens, copies.parents, copies.agreed, strict=True)):
            if parent != node or depth == len(drawn):
                continue
            at, hit = min(agreed, self._most), token == drawn[depth]
            self._hits[at] = self._hits[at] * _KEEP + hit
            self._of[at] = self._of[at] * _KEEP + 1
            if hit:
                node, depth = draft, depth + 1


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
        self._made: list[Copies | None] = [None] * num_rows
        """The latest drafts."""
        self._agreements = Agreements(most)

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._index[row] = NgramIndex(token_ids.tolist(), *self._sizes)
        self._made[row] = None

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        for row, drawn, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            if (index := self._index[row]) is not None:
                index.tokens += drawn[:count]
            if (made := self._made[row]) is not None:
                self._agreements.learn(made, drawn[:count])
                self._made[row] = None

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        depth = self._tree_depth
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        parents, worth = drafts.follows.copy(), np.zeros(drafts.tokens.shape)
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            if count > 0 and (index := self._index[row]) is not None:
                made = index.propose(count) if depth is None else index.propose_tree(count, depth)
                if num := len(made.tokens):
                    self._made[row] = made
                    drafts.num[i], drafts.tokens[i, :num], parents[i, :num] = num, made.tokens, made.parents
                    worth[i, :num] = self._agreements.worth(made)
        return replace(drafts, parents=None if depth is None else parents, worth=worth)
