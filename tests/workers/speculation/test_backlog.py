"""What waits is what was put last, whatever was taken in between."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipring.workers.speculation.backlog import Backlog, Positions

NUM_ROWS, CAPACITY = 3, 5


def of_rows(rows: list[int], start: list[int], count: list[int]) -> Positions:
    """States and following tokens that tell row and position."""
    told = np.array([100 * r + s + i for r, s, n in zip(rows, start, count, strict=True) for i in range(n)], np.int64)
    states = torch.from_numpy(told).float()[:, None].repeat(1, 2)
    return Positions(*(np.array(each, np.int64) for each in (rows, start, count)), states, told + 7)


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "forget", "jump"]), st.lists(st.integers(0, 9), max_size=3))))
def test_backlog(steps: list[tuple[str, list[int]]]) -> None:
    backlog = Backlog(NUM_ROWS, CAPACITY, 2, torch.float32)
    kept, end, jumped = [list[int]() for _ in range(NUM_ROWS)], [0] * NUM_ROWS, set[int]()
    for what, counts in steps:
        rows = list(range(len(counts)))
        if what == "put":
            backlog.put(of_rows(rows, [end[row] for row in rows], counts))
            for row, count in enumerate(counts):
                before = [] if row in jumped else kept[row]
                kept[row] = [*before, *range(end[row], end[row] + count)][-CAPACITY:]
                jumped.discard(row)
                end[row] += count
        elif what == "take":
            found = backlog.take(np.array(rows, np.int64))
            expected = of_rows(rows, [min(kept[row], default=0) for row in rows], [len(kept[row]) for row in rows])
            some = expected.count > 0
            assert found.count.tolist() == expected.count.tolist()
            assert found.start[some].tolist() == expected.start[some].tolist()
            assert torch.equal(found.states, expected.states)
            assert found.following.tolist() == expected.following.tolist()
            for row in rows:
                kept[row] = []
        elif what == "forget":
            for row in rows:
                backlog.forget(row)
                kept[row], end[row] = [], 0
                jumped.discard(row)
        else:  # positions that went another way
            for row, count in enumerate(counts):
                end[row] += count
                jumped |= {row} if count else set()


def test_some_rows_without_their_first_positions() -> None:
    cut = of_rows([2, 0, 1], [10, 20, 30], [3, 2, 4]).of(np.array([2, 0, 1]), np.array([1, 0, 5]))
    expected = of_rows([1, 2, 0], [31, 10, 22], [3, 3, 0])
    assert cut.start.tolist() == expected.start.tolist() and cut.count.tolist() == expected.count.tolist()
    assert torch.equal(cut.states, expected.states) and cut.following.tolist() == expected.following.tolist()
