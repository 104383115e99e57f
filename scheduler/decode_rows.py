"""The rows in plain decode, as dense columns: the state that the steady step reads and writes with slices.

Entries [0, num) are live; a row that leaves is replaced by the last entry (swap-remove), so row ids never move but
positions do. Every entry goes into every step, one token each, which is why its position simply counts up.

    start   position computed next; the token there may still be in flight
    event   position at which the entry needs attention: it crosses into a block it does not have, or it is done
    last    position whose computation would draw a token past the request's limit: never scheduled
"""

from __future__ import annotations

import numpy as np

from slipring.scheduler.request import Request


class DecodeRows:
    def __init__(self, capacity: int, num_rows: int) -> None:
        self.num = 0
        self.row = np.zeros(capacity, np.int32)
        self.generation = np.zeros(capacity, np.int32)
        self.start = np.zeros(capacity, np.int32)
        self.event = np.zeros(capacity, np.int32)
        self.last = np.zeros(capacity, np.int32)
        self.num_blocks = np.zeros(capacity, np.int32)
        self.requests: list[Request] = []
        self._index_of_row = np.full(num_rows, -1, np.int32)

    def __contains__(self, row: int) -> bool:
        return self._index_of_row[row] >= 0

    def add(self, request: Request, generation: int, start: int, num_blocks: int, block_size: int) -> None:
        at = self.num
        self.row[at] = request.row
        self.generation[at] = generation
        self.start[at] = start
        self.last[at] = request.limit - 1
        self.num_blocks[at] = num_blocks
        self.event[at] = min(num_blocks * block_size, request.limit - 1)
        self.requests.append(request)
        self._index_of_row[request.row] = at
        self.num = at + 1

    def remove(self, row: int) -> None:
        at, end = int(self._index_of_row[row]), self.num - 1
        for column in (self.row, self.generation, self.start, self.event, self.last, self.num_blocks):
            column[at] = column[end]
        self.requests[at] = self.requests[end]
        self.requests.pop()
        self._index_of_row[self.row[at]] = at
        self._index_of_row[row] = -1
        self.num = end

    def check_integrity(self) -> None:
        assert len(self.requests) == self.num, "dense columns and requests differ in length"
        rows = self.row[: self.num].tolist()
        assert rows == [request.row for request in self.requests], "a dense row is not its request's"
        assert [int(self._index_of_row[row]) for row in rows] == list(range(self.num)), "row index is off"
        assert int((self._index_of_row >= 0).sum()) == self.num, "a row that left is still indexed"
