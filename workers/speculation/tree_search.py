"""Growing a draft tree with a model that guesses one token further at a time (EAGLE-2, Li et al. 2024).

Level by level the most promising drafts are read by the draft model (*fed*), and its best guesses behind each of them
are the next candidates. A candidate's worth is the product of the chances on its path. In the end the candidates that
are worth most are the drafts: a tree, because none is worth more than the one that it follows. A chain is the tree
whose every draft is followed by one other.

Fed drafts lie in the draft model's cache one after the other from the row's last position on. They are no more than
the drafts that the row may have, so they lie in blocks that are the row's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.workers.speculation.proposer import Drafts, IntArray
from slipring.workers.speculation.tree import Branches

FloatArray = NDArray[np.float64]
_MOST_CHILDREN = 10
_NEVER = -np.inf


@dataclass(frozen=True, slots=True)
class Fed:
    """What a draft model reads next, [R, F] tokens at most."""

    num: IntArray
    """[R]: of each row, the first ones."""
    tokens: IntArray
    """[R, F]"""
    start: IntArray
    """[R]: position in the cache of the first one."""
    branches: Branches | None
    """None: each row has one, which sees all that lies before it."""


Read = Callable[[Fed, Tensor], Tensor]
"""(N tokens, row by row, the states [N, H] that they were guessed from) -> the states [N, H] behind them."""
Guessed = tuple[IntArray, FloatArray, NDArray[np.void] | None]
Guess = Callable[[Tensor, IntArray, IntArray, int], Guessed]
"""(states [N, H], rows [N], position [N] of what is guessed, k) -> the k likeliest tokens and the logarithms of their
chances, [N, k] both, best first, and for rejection sampling what they were drawn from, [N, C] of `PROPOSAL`."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    depth: int | None
    """Most drafts that follow each other; None: as many as are asked for, in a chain."""
    num_children: int = 1
    """Candidates behind each draft that is fed, and most drafts that are fed in one level."""
    paths: tuple[tuple[int, ...], ...] = ()
    """A fixed tree, as paths of ranks, shorter ones first; empty: whatever is worth most."""

    @classmethod
    def of(cls, tree_depth: int | None, max_draft: int, paths: tuple[tuple[int, ...], ...] = ()) -> TreeShape:
        """For trees of so many drafts (None: chains): as wide as they may be at every level."""
        if paths:
            return cls(len(paths[-1]), 1 + max(max(path) for path in paths), paths)
        if tree_depth is None:
            return cls(None)
        return cls(tree_depth, max(1, min(_MOST_CHILDREN, (max_draft + 1) // max(1, tree_depth - 1))))

    def children(self, level: int) -> tuple[IntArray, IntArray] | None:
        """Of a fixed tree's level, counted from 1: for each draft the place of its parent among those that were fed,
        and its rank."""
        if not self.paths:
            return None
        fed = self.fed(level - 1)
        of_level = [path for path in self.paths if len(path) == level]
        return np.array([fed.index(path[:-1]) for path in of_level]), np.array([path[-1] for path in of_level])

    def fed(self, level: int) -> list[tuple[int, ...]]:
        """A fixed tree's drafts in that level which others follow."""
        parents = {path[:-1] for path in self.paths}
        return [path for path in ((), *self.paths) if len(path) == level and path in parents]


CHAINS = TreeShape(None)


class TreeSearch:
    """One step's drafts of R rows."""

    def __init__(self, shape: TreeShape, rows: IntArray, position: IntArray, most: IntArray) -> None:
        """position [R]: of the rows' last tokens; most [R]: drafts, at least 1."""
        self._shape, self._rows, self._position, self._most = shape, rows, position, most
        nothing = np.zeros((len(rows), 0), np.int64)
        self._tokens, self._parents, self._logp = nothing, nothing, nothing.astype(np.float64)
        """[R, C]: all candidates. Those that are not worth a thought are worth nothing at all."""
        self._level = 0
        """Index of the latest level's first candidate."""
        self._fed = np.zeros(len(rows), np.int64)
        self._sees = nothing
        """[R, C]: bits of the fed drafts on each candidate's path."""
        self._state = nothing
        """[R, C]: index of the state that each candidate was guessed from."""
        self._proposals: list[NDArray[np.void]] = []
        """Of each state, level by level."""

    def run(self, states: Tensor, read: Read, guess: Guess) -> Drafts:
        """states [R, H]: behind the rows' last tokens."""
        num_rows, width = len(self._rows), self._shape.num_children
        entry, place = np.arange(num_rows), np.zeros(num_rows, np.int64)
        root = np.full((num_rows, 1), -1)
        self._add(1, entry, place, root, guess(states, self._rows, self._position + 1, width), 0)
        depth = int(self._most.max()) if self._shape.depth is None else self._shape.depth
        for level in range(2, depth + 1):
            picked, num = self._pick(level)
            if not num.any():
                break
            entry, place = np.nonzero(np.arange(picked.shape[1]) < num[:, None])
            chosen = picked[entry, place]
            fed = self._feed(picked, num, level)
            behind = read(fed, states.index_select(0, torch.from_numpy(self._state[entry, chosen])))
            begin, states = len(states), torch.cat((states, behind))
            rows, position = self._rows[entry], self._position[entry] + level
            self._add(level, entry, place, picked, guess(behind, rows, position, width), begin)
        return self._best()

    def _pick(self, level: int) -> tuple[IntArray, IntArray]:
        """(picked [R, F], num [R]): candidates of the latest level that are fed now, the first num of each row."""
        logp, begin = self._logp[:, self._level :], self._level
        if self._shape.paths:
            before = [path for path in self._shape.paths if len(path) == level - 1]
            picked = np.array([before.index(path) for path in self._shape.fed(level - 1)], np.int64)
            picked = np.broadcast_to(picked, (len(logp), len(picked)))
        else:
            picked = np.argsort(-logp, 1, kind="stable")[:, : self._shape.num_children]
        # What follows a draft is worth no more than it: where that would be left out in the end, nobody need look.
        rank = np.argsort(np.argsort(-self._logp, 1, kind="stable"), 1)
        useful = np.take_along_axis((rank[:, begin:] < self._most[:, None] - 1) & (logp > _NEVER), picked, 1)
        order = np.argsort(~useful, 1, kind="stable")
        num = np.minimum(useful.sum(1), self._most + 1 - self._fed)
        return np.take_along_axis(picked, order, 1) + begin, num

    def _feed(self, picked: IntArray, num: IntArray, level: int) -> Fed:
        start, width = self._position + self._fed, int(num.max())
        slot = self._fed[:, None] + np.arange(picked.shape[1])
        sees = np.take_along_axis(self._sees, picked, 1) | (1 << slot)
        np.put_along_axis(self._sees, picked, sees, 1)
        self._fed = self._fed + num
        tokens = np.take_along_axis(self._tokens, picked[:, :width], 1)
        if self._shape.num_children == 1:
            return Fed(num, tokens, start, None)
        depth = np.full(tokens.shape, level - 2)
        return Fed(num, tokens, start, Branches(self._position, depth, sees[:, :width]))

    def _add(
        self, level: int, entry: IntArray, place: IntArray, picked: IntArray, guessed: Guessed, begin: int
    ) -> None:
        """Candidates: what was guessed behind picked[entry, place] [N], whose states' indices begin at `begin`."""
        tokens, logp, proposals = guessed
        if proposals is not None:
            self._proposals.append(proposals)
        (num_rows, num_fed), num_children = picked.shape, tokens.shape[1]
        shape = (num_rows, num_fed, num_children)
        found, chance, state = np.zeros(shape, np.int64), np.full(shape, _NEVER), np.zeros(shape, np.int64)
        found[entry, place], chance[entry, place] = tokens, logp
        state[entry, place] = (begin + np.arange(len(entry)))[:, None]
        parent = np.broadcast_to(picked[:, :, None], shape)
        if self._logp.shape[1]:
            chance += np.take_along_axis(self._logp, picked, 1)[:, :, None]
        candidates = (found, chance, state, parent)
        if (children := self._shape.children(level)) is not None:
            candidates = (each[:, children[0], children[1]] for each in candidates)
        found, chance, state, parent = (each.reshape(num_rows, -1) for each in candidates)
        sees = np.where(parent < 0, 0, np.take_along_axis(self._sees, np.maximum(parent, 0), 1)) if level > 1 else 0
        self._level = self._logp.shape[1]
        self._tokens, self._parents = np.hstack((self._tokens, found)), np.hstack((self._parents, parent))
        self._logp, self._state = np.hstack((self._logp, chance)), np.hstack((self._state, state))
        self._sees = np.hstack((self._sees, np.broadcast_to(sees, found.shape)))

    def _best(self) -> Drafts:
        order = np.argsort(-self._logp, 1, kind="stable")
        kept = np.argsort(order, 1) < self._most[:, None]
        kept &= self._logp > _NEVER
        worth = np.exp(self._logp)
        everything = Drafts(self._tokens, np.full(len(worth), worth.shape[1]), self._parents, worth)
        found = everything.keep(kept)
        return self._drawn(found) if self._proposals else found

    def _drawn(self, found: Drafts) -> Drafts:
        """Chains, with what they were drawn from. What later drafts are worth says what was drawn before them, so for
        sampled rows the first draft's worth, which does not, has to do for all."""
        assert found.worth is not None
        place = np.arange(found.tokens.shape[1])
        proposals = np.concatenate(self._proposals)[self._state[:, place]]
        is_drawn = proposals["chance"][:, :1].any(2)
        worth = np.where(is_drawn, found.worth[:, :1] ** (1 + place), found.worth)
        return replace(found, worth=worth, proposals=proposals)
