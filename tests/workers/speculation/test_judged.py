"""What drafts are worth, by what came of others."""

from __future__ import annotations

import numpy as np
import pytest

from slipring.workers.speculation.judged import Judged
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer

PARENTS = np.array([-1, -1, 0, 0, 3])
"""Two children of the last token, two behind the first of these, and one behind that one's second."""
ROW, TOKEN = np.array([3]), 5


class Branching(NullProposer):
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        return Drafts(np.tile(np.arange(5), (len(rows), 1)), np.full(len(rows), 5), np.tile(PARENTS, (len(rows), 1)))


class Saying(NullProposer):
    """Two drafts, and what it thinks of them."""

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        shape = (len(rows), 2)
        return Drafts(np.full(shape, TOKEN), np.full(len(rows), 2), worth=np.tile([0.8, 0.4], (len(rows), 1)))


def judged(proposer: NullProposer) -> Judged:
    found = Judged(proposer, 8)
    found.admit(3, np.zeros(0, np.int32))
    return found


def worth_of(proposer: Judged, drafts: Drafts) -> np.ndarray:
    worth = proposer.judge(ROW, drafts).worth
    assert worth is not None
    return worth


def step(proposer: Judged, drawn: int, kept: int) -> np.ndarray:
    """Worth of the drafts of one step, of which `kept` are taken, and after which `drawn` comes all the time."""
    proposer.begin(ROW)
    drafts = proposer.propose(ROW, np.array([5]))
    worth = worth_of(proposer, drafts)
    proposer.take(ROW, drafts, np.arange(drafts.tokens.shape[1])[None] < kept)
    right = drawn == TOKEN
    proposer.accept(ROW, np.full((1, 6), drawn), np.array([1 + kept * right]))
    return worth[0]


def test_a_tree_without_sayings_is_judged_by_depth_and_rank() -> None:
    proposer = judged(Branching())
    worth = worth_of(proposer, proposer.propose(ROW, np.array([5])))
    a = float(proposer.acceptance(ROW)[0])
    assert worth[0] == pytest.approx([a, a * (1 - a), a * a, a * a * (1 - a), a**3 * (1 - a)])


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_sayings_are_corrected_whether_drafts_are_taken_or_not(kept: int) -> None:
    proposer = judged(Saying())
    good = [step(proposer, TOKEN, kept) for _ in range(40)][-1]
    assert good[0] == pytest.approx(1.0, abs=0.1)
    bad = [step(proposer, 9, kept) for _ in range(60)][-1]
    assert bad[0] < 0.1 and bad[1] == pytest.approx(bad[0] / 2)


def test_a_row_that_is_handed_out_again_begins_with_what_came_of_all() -> None:
    proposer = judged(Saying())
    for _ in range(40):
        step(proposer, 9, 2)
    low = step(proposer, 9, 2)[0]
    proposer.admit(3, np.zeros(0, np.int32))
    assert low < step(proposer, 9, 2)[0] < 0.64
