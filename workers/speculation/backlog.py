"""What a draft head has still to enter: of each row the latest positions, with the target's states there and the tokens
after them. Kept until the row is asked for drafts; what does not fit any more is lost to the head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipring.workers.entries import tokens_of
from slipring.workers.speculation.proposer import IntArray

_SIZE = 64
"""Positions of a row: as many as it may sleep for (`adaptive.py`)."""


def backlog_size(block_size: int) -> int:
    """Room for each row. What begins anew begins with a block, so there is always a whole one."""
    return max(_SIZE, 2 * block_size)


@dataclass(frozen=True, slots=True)
class Positions:
    """Of each of some rows, positions that follow each other; T in all, row by row."""

    rows: IntArray
    """[R]"""
    start: IntArray
    """[R]"""
    count: IntArray
    """[R]"""
    states: Tensor
    """[T, width]: the target's, as the head reads them."""
    following: IntArray
    """[T]: the token after each."""

    def of(self, which: IntArray, skip: IntArray | int = 0) -> Positions:
        """Those of the rows with these indices [n] alone, in their order, without the first skip [n] of each."""
        skip = np.minimum(skip, self.count[which])
        first, count = (np.cumsum(self.count) - self.count)[which] + skip, self.count[which] - skip
        entry, place = tokens_of(count)
        at = first[entry] + place
        states = self.states.index_select(0, torch.from_numpy(at))
        return Positions(self.rows[which], self.start[which] + skip, count, states, self.following[at])


class Backlog:
    def __init__(self, num_rows: int, capacity: int, width: int, dtype: torch.dtype) -> None:
        """`capacity`: positions of a row."""
        self.capacity = capacity
        self._states = torch.empty((num_rows, capacity, width), dtype=dtype)  # no page is touched before it is used
        self._following = np.zeros((num_rows, capacity), np.int64)
        self._start, self._end = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)

    def forget(self, row: int) -> None:
        self._start[row] = self._end[row] = 0

    def num(self, rows: IntArray) -> IntArray:
        """[R]: positions that wait."""
        return self._end[rows] - self._start[rows]

    def put(self, new: Positions) -> None:
        """The rows go on; one that does not go on where it ended begins anew."""
        end = new.start + new.count
        start = np.where(new.start == self._end[new.rows], self._start[new.rows], new.start)
        self._start[new.rows], self._end[new.rows] = np.maximum(start, end - self.capacity), end
        entry, place = tokens_of(new.count)
        position = new.start[entry] + place
        late = np.flatnonzero(position >= end[entry] - self.capacity)
        rows, at = new.rows[entry[late]], position[late] % self.capacity
        self._states[torch.from_numpy(rows), torch.from_numpy(at)] = new.states.index_select(0, torch.from_numpy(late))
        self._following[rows, at] = new.following[late]

    def take(self, rows: IntArray) -> Positions:
        """All that there is of these rows; it is gone then."""
        start = self._start[rows]
        count = self.num(rows)
        entry, place = tokens_of(count)
        of_rows, at = rows[entry], (start[entry] + place) % self.capacity
        self._start[rows] = self._end[rows]
        states = self._states[torch.from_numpy(of_rows), torch.from_numpy(at)]
        return Positions(rows, start, count, states, self._following[of_rows, at])
