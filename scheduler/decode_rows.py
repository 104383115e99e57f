"""The rows in decode, as dense columns: the state that the steady step reads and writes with slices.

Entries [0, num) are live; a row that leaves is replaced by the last entry (swap-remove), so row ids never move but
positions do. Every entry goes into every step with one token, and with up to `num_draft` drafts, which is why its
position simply counts up.

    start    position computed next, if all drafts in flight are accepted; the token there may still be in flight
    slack    drafts in flight: `start - slack` is the position computed next if none of them is accepted
    grow_at  first position in a block that the row does not have yet; NEVER when it will need no more blocks
    last     position whose computation would draw a token past the request's limit: never scheduled

What a returned step rejected is taken back from `start` (`take_back`), so both bounds meet whenever nothing is in
flight. A row is done when its lower bound has reached `last`; a worker computes nothing beyond it either way.

Since every position counts up with each step, the next time that anybody needs attention is a countdown and not a
search: `grow_in`, in positions, and `done_in`, in steps, are lower bounds on what is left until a row needs a block,
or is done.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.request import Request
from slipring.shm.wire import StepInputView

NEVER = 2**30
"""A position that no row reaches."""


class DecodeRows:
    def __init__(self, capacity: int, num_rows: int) -> None:
        self.num = 0
        self.grow_in = self.done_in = NEVER
        self.row = np.zeros(capacity, np.int32)
        self.generation = np.zeros(capacity, np.int32)
        self.start = np.zeros(capacity, np.int32)
        self.slack = np.zeros(capacity, np.int32)
        self.grow_at = np.zeros(capacity, np.int32)
        self.last = np.zeros(capacity, np.int32)
        self.requests: list[Request] = []
        self._index_of_row = np.full(num_rows, -1, np.int32)

    def __contains__(self, row: int) -> bool:
        return self._index_of_row[row] >= 0

    def add(self, request: Request, generation: int, start: int, border: int) -> None:
        """`border`: the first position beyond the blocks that the row has."""
        at = self.num
        self.row[at] = request.row
        self.generation[at] = generation
        self.start[at] = start
        self.slack[at] = 0
        self.last[at] = request.limit - 1
        self.grow_at[at] = border if border < request.limit - 1 else NEVER
        self.grow_in = min(self.grow_in, border - start)
        self.done_in = min(self.done_in, request.limit - 1 - start)
        self.requests.append(request)
        self._index_of_row[request.row] = at
        self.num = at + 1

    def remove(self, row: int) -> None:
        at, end = int(self._index_of_row[row]), self.num - 1
        for column in (self.row, self.generation, self.start, self.slack, self.grow_at, self.last):
            column[at] = column[end]
        self.requests[at] = self.requests[end]
        self.requests.pop()
        self._index_of_row[self.row[at]] = at
        self._index_of_row[row] = -1
        self.num = end

    def advance(self, num_draft: int) -> None:
        """Every entry goes one position further, and another `num_draft` if all its drafts are accepted."""
        start = self.start[: self.num]
        start += 1 + num_draft
        if num_draft:
            self.slack[: self.num] += num_draft
        self.grow_in -= 1 + num_draft
        self.done_in -= 1

    def take_back(self, rows: NDArray[np.int32], num_draft: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """A step is back that held up to `num_draft` drafts for each of these rows, of which `accepted` were right."""
        at = self._index_of_row[rows]
        here = at >= 0
        at = at[here]
        self.start[at] -= (num_draft - accepted)[here]
        self.slack[at] -= num_draft[here]
        self.done_in -= int(accepted.max(initial=0))

    def done_rows(self) -> list[int]:
        """Rows of the entries that must not be scheduled again; resets the countdown to the next ones."""
        left = self.last[: self.num] - self.start[: self.num] + self.slack[: self.num]
        done = (left <= 0).nonzero()[0]
        left[done] = NEVER
        self.done_in = int(left.min(initial=NEVER))
        return self.row[done].tolist()

    def check_integrity(self) -> None:
        num, start = self.num, self.start[: self.num]
        assert (self.grow_at[:num] - start).min(initial=NEVER) >= self.grow_in, "the countdown to growth is late"
        assert (self.slack[:num] >= 0).all(), "more drafts came back than went out"
        lower = start - self.slack[:num]
        assert (self.last[:num] - lower).min(initial=NEVER) >= self.done_in, "the countdown to an end is late"
        assert len(self.requests) == self.num, "dense columns and requests differ in length"
        rows = self.row[: self.num].tolist()
        assert rows == [request.row for request in self.requests], "a dense row is not its request's"
        assert [int(self._index_of_row[row]) for row in rows] == list(range(self.num)), "row index is off"
        assert int((self._index_of_row >= 0).sum()) == self.num, "a row that left is still indexed"


class PendingAppends:
    """Block appends that have been entered into the table and go out with the next step, at most one for each row."""

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self._rows = np.zeros(capacity, np.int32)
        self._index = np.zeros(capacity, np.int32)
        self._blocks = np.zeros(capacity, np.int32)

    def add(self, rows: NDArray[np.int32], index: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        at, end = self.count, self.count + len(rows)
        self._rows[at:end] = rows
        self._index[at:end] = index
        self._blocks[at:end] = blocks
        self.count = end

    def drain(self, view: StepInputView) -> int:
        """Write them to the beginning of the step's appends; returns how many."""
        count, self.count = self.count, 0
        view.append_rows[:count] = self._rows[:count]
        view.append_index[:count] = self._index[:count]
        view.append_blocks[:count] = self._blocks[:count]
        return count

    def forget(self, row: int) -> None:
        """The row has ended: an append of its admission must not reach the row's next one."""
        if self.count:
            keep = (self._rows[: self.count] != row).nonzero()[0]
            count = len(keep)
            for column in (self._rows, self._index, self._blocks):
                column[:count] = column[keep]
            self.count = count
