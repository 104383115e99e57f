"""Rows of the batch table: who holds which, under which generation, and which are in quarantine.

A row belongs to one admission. When it ends its generation is bumped at once, so that frames still in flight no
longer match, and the row stays in quarantine until every step that names it has come back: until then a worker may
still read its columns.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_WRAP = 2**31 - 1


class RowAllocator:
    def __init__(self, generation: NDArray[np.int32]) -> None:
        """`generation` is the batch table's column, of which this is the only writer."""
        self._generation = generation
        self._free = list(range(len(generation) - 1, -1, -1))
        self._quarantine: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def hand_out(self) -> int | None:
        if not self._free:
            return None
        row = self._free.pop()
        self._bump(row)
        return row

    def end(self, row: int, last_step_id: int) -> None:
        """End the row's admission; `last_step_id` is the newest step that may name it."""
        self._bump(row)
        self._quarantine.append((last_step_id, row))

    def returned(self, step_id: int) -> None:
        """All steps up to `step_id` are back."""
        while self._quarantine and self._quarantine[0][0] <= step_id:
            self._free.append(self._quarantine.popleft()[1])

    def _bump(self, row: int) -> None:
        self._generation[row] = (int(self._generation[row]) + 1) % _WRAP

    def check_integrity(self, held: list[int]) -> None:
        """Every row is held, free or in quarantine, and in one of these only."""
        everything = held + self._free + [row for _, row in self._quarantine]
        assert sorted(everything) == list(range(len(self._generation))), "a row is lost or has two owners"
