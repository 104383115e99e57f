"""The controller: drafts where they pay, none where they do not, and another try after a while."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.step_costs import StepCosts

SIZES = (1, 2, 4, 8, 16, 64)
FLAT = [0.010, 0.0102, 0.0106, 0.0114, 0.013, 0.022]
STEEP = [0.010, 0.020, 0.040, 0.080, 0.160, 0.640]


class Eager(NullProposer):
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        return Drafts(np.ones((len(rows), int(most.max())), np.int64), most.copy())


class EagerAtACost(Eager):
    is_free = False


RIGHT, WRONG = 1, 99
"""Tokens that are drawn; `Eager` drafts the first one."""


def run(proposer: AdaptiveProposer, rows: list[int], chance: list[float], steps: int, most: int = 5) -> np.ndarray:
    """[steps, rows] drafts that were made, where a row's drafts are right with that chance each."""
    rng, of_rows, made = np.random.default_rng(1), np.array(rows), []
    for _ in range(steps):
        drafts = proposer.propose(of_rows, np.full(len(rows), most))
        right = rng.random((len(rows), most)) < np.array(chance)[:, None]
        accepted = np.minimum(right.cumprod(1).sum(1), drafts.num)
        tokens = np.concatenate((np.where(right, RIGHT, WRONG), np.zeros((len(rows), 1), np.int64)), 1)
        proposer.accept(of_rows, tokens, accepted + 1)
        made.append(drafts.num)
    return np.array(made)


def adaptive(seconds: list[float], proposer: type[Eager] = Eager) -> AdaptiveProposer:
    proposer = AdaptiveProposer(proposer(), StepCosts(SIZES, seconds), num_rows=8)
    for row in range(8):
        proposer.admit(row, np.zeros(0, np.int32))
    return proposer


def test_right_drafts_are_all_taken_where_tokens_are_cheap() -> None:
    assert (run(adaptive(FLAT), [3], [1.0], 20)[5:] == 5).all()


def test_nothing_is_drafted_where_each_token_costs_a_step() -> None:
    assert run(adaptive(STEEP), [3], [0.5], 100).mean() < 0.3


def test_wrong_drafts_are_dropped_and_tried_again_where_they_take_time() -> None:
    assert not run(adaptive(FLAT), [3], [0.0], 400)[150:].any(), "free ones are judged without"
    made = run(adaptive(FLAT, EagerAtACost), [3], [0.0], 400)[:, 0]
    late = made[100:]
    assert late.mean() < 0.1, "it is switched off"
    assert late.any(), "but not for good"


@pytest.mark.parametrize(("kind", "steps"), [(Eager, 30), (EagerAtACost, 150)])
def test_a_row_that_turns_predictable_is_found(kind: type[Eager], steps: int) -> None:
    proposer = adaptive(FLAT, kind)
    run(proposer, [3], [0.0], 200)
    assert run(proposer, [3], [1.0], steps)[-20:].mean() > 3


def test_rows_are_judged_by_themselves() -> None:
    made = run(adaptive(FLAT), [1, 2], [0.95, 0.05], 100)[30:]
    assert made[:, 0].mean() > 3 and made[:, 1].mean() < 1.5


def test_a_full_batch_drafts_less_than_a_lone_row() -> None:
    # Beyond 16 tokens each one costs as much as it brings.
    seconds = [0.010, 0.0101, 0.0103, 0.0107, 0.0115, 0.060]
    alone = run(adaptive(seconds), [0], [0.6], 60)[20:].mean()
    full = run(adaptive(seconds), list(range(8)), [0.6] * 8, 60)[20:].mean()
    assert full < alone


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts(SIZES, FLAT)
    for _ in range(100):
        costs.observe(1, 0.020)
    assert costs.of(np.array([1]))[0] == pytest.approx(0.020, rel=0.05)
    assert costs.of(np.array([8]))[0] > 0.015, "a slower machine is slower for all steps"
    for _ in range(100):
        costs.observe(8, 0.050)
    assert costs.of(np.array([8]))[0] == pytest.approx(0.050, rel=0.1)


def test_costs_never_fall_with_more_tokens_and_grow_beyond_the_measured() -> None:
    costs = StepCosts((1, 2, 4), [0.02, 0.01, 0.03])
    assert (np.diff(costs.of(np.arange(1, 5))) >= 0).all()
    assert costs.of(np.array([8]))[0] == pytest.approx(0.06)
    for seconds in (0.02, 0.07, 0.01):
        costs.observe(3, seconds)
        assert [costs.at(size) for size in range(1, 12)] == pytest.approx(costs.of(np.arange(1, 12)).tolist())


class Branching(NullProposer):
    """Two children of the last token, two behind the first of these, and one behind that one's second."""

    PARENTS = np.array([-1, -1, 0, 0, 3])

    def __init__(self, worth: list[float] | None = None) -> None:
        self._worth = worth

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        tokens, parents = np.tile(np.arange(5), (len(rows), 1)), np.tile(self.PARENTS, (len(rows), 1))
        worth = None if self._worth is None else np.tile(np.array(self._worth), (len(rows), 1))
        return Drafts(tokens, np.full(len(rows), 5), parents, worth)


def test_of_a_tree_the_drafts_are_taken_that_are_worth_most() -> None:
    costs = StepCosts(SIZES, [0.010, 0.0102, 0.0104, 0.060, 0.120, 0.480])  # up to four tokens cost next to nothing
    proposer = AdaptiveProposer(Branching([0.7, 0.2, 0.05, 0.6, 0.5]), costs, num_rows=8, tree_depth=3)
    proposer.admit(3, np.zeros(0, np.int32))
    drafts = proposer.propose(np.array([3]), np.array([5]))
    assert drafts.num.tolist() == [3]
    assert drafts.tokens.tolist() == [[0, 3, 4]] and drafts.parents is None, "what is left of the tree is a chain"


def test_sayings_are_corrected_by_what_comes_of_them() -> None:
    """A proposer that promises too much is not believed for long."""
    proposer = AdaptiveProposer(Branching([0.9, 0.9, 0.9, 0.9, 0.9]), StepCosts(SIZES, FLAT), 8, tree_depth=3)
    proposer.admit(3, np.zeros(0, np.int32))
    made = run(proposer, [3], [0.0], 100)[:, 0]
    assert made[0] == 5 and made[-30:].mean() < 0.3


class Slow(EagerAtACost):
    """Takes so many seconds for each level of drafts, and to catch up, by its own clock."""

    def __init__(self, seconds: float, catch_up_seconds: float = 0.0) -> None:
        self._each, self._catch_up, self.now = seconds, catch_up_seconds, 0.0

    def catch_up(self, rows: IntArray) -> None:
        self.now += self._catch_up * len(rows)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        self.now += self._each * int(most.max())
        return super().propose(rows, most)


@pytest.mark.parametrize(
    ("seconds", "catch_up", "many"), [(0.0001, 0.0, True), (0.008, 0.0, False), (0.0001, 0.03, False)]
)
def test_drafts_must_be_worth_the_time_that_they_take(seconds: float, catch_up: float, many: bool) -> None:
    slow = Slow(seconds, catch_up)
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), num_rows=8, clock=lambda: slow.now)
    proposer.admit(3, np.zeros(0, np.int32))
    made = run(proposer, [3], [0.7], 60)[10:].mean()
    assert made > 2 if many else made < 0.5


def test_rows_that_nobody_asked_for_say_nothing_about_the_time_it_takes() -> None:
    """Each new row is awake: a dear proposer is not asked for it, either, and stays dear."""
    slow, asked = Slow(0.0001, 0.03), 0
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), num_rows=8, clock=lambda: slow.now)
    for _ in range(60):
        proposer.admit(3, np.zeros(0, np.int32))
        asked += int((run(proposer, [3], [0.7], 3) > 0).sum())
    assert asked < 20


def test_what_is_caught_up_with_once_does_not_make_a_proposer_dear() -> None:
    """A long prompt, in slices or at once, says nothing about the steps after it."""

    class Prompted(Slow):
        num_left = 3

        def catch_up(self, rows: IntArray) -> None:
            self.now += 0.2 * len(rows) * (self.num_left > 0)

        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            self.num_left -= 1
            return super().propose(rows, most) if self.num_left < 1 else Drafts.none(len(rows), int(most.max()))

    slow = Prompted(0.0001)
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), num_rows=8, clock=lambda: slow.now)
    for _ in range(8):
        slow.num_left = 3
        proposer.admit(3, np.zeros(0, np.int32))
        assert run(proposer, [3], [0.7], 10)[2:].mean() > 1.5


def test_a_stall_that_was_taken_for_what_catching_up_takes_is_found_out() -> None:
    slow = Slow(0.0001, 0.1)
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), num_rows=8, clock=lambda: slow.now)
    proposer.admit(3, np.zeros(0, np.int32))
    assert run(proposer, [3], [0.7], 20)[-10:].mean() < 0.5
    slow._catch_up = 0.0
    assert run(proposer, [3], [0.7], 2000)[-50:].mean() > 1.5


def test_a_try_that_stalls_is_not_the_last_one() -> None:
    slow = Slow(0.001)
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), num_rows=8, clock=lambda: slow.now)
    proposer.admit(3, np.zeros(0, np.int32))
    run(proposer, [3], [0.0], 50)
    slow._each = 5.0
    while not run(proposer, [3], [0.0], 1).any():
        pass
    slow._each = 0.001
    assert run(proposer, [3], [0.0], 300).any()


@given(data=st.data(), width=st.integers(1, 8), num_rows=st.integers(1, 3))
def test_whatever_is_kept_of_a_tree_hangs_where_it_hung(data: st.DataObject, width: int, num_rows: int) -> None:
    parents = np.array([[data.draw(st.integers(-1, i - 1)) for i in range(width)] for _ in range(num_rows)])
    kept = np.zeros((num_rows, width), bool)
    for row in range(num_rows):
        for draft in range(width):
            parent = parents[row, draft]
            kept[row, draft] = (parent < 0 or kept[row, parent]) and data.draw(st.booleans())
    drafts = Drafts(np.arange(num_rows * width).reshape(num_rows, width), np.full(num_rows, width), parents)
    cut = drafts.keep(kept)
    assert (cut.num == kept.sum(1)).all()
    for row in range(num_rows):
        old = [int(draft) for draft in np.flatnonzero(kept[row])]
        num = len(old)
        assert cut.tokens[row, :num].tolist() == drafts.tokens[row, old].tolist()
        hung = [-1 if parents[row, draft] < 0 else old.index(int(parents[row, draft])) for draft in old]
        assert cut.follows[row, :num].tolist() == hung
    assert (cut.follows < np.arange(cut.tokens.shape[1])).all()


def test_tries_take_a_small_share_of_the_time_however_many_rows_there_are() -> None:
    seconds = [0.010 * size for size in SIZES]  # each token costs as much as any other
    made = run(adaptive(seconds, EagerAtACost), list(range(8)), [0.3] * 8, 400)
    late = made[100:]
    assert late.any(), "they are tried"
    assert late.sum() <= 0.02 * late.size


def test_rows_that_wait_are_not_asked_until_the_batch_shrinks() -> None:
    asked: list[int] = []

    class Counting(EagerAtACost):
        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            asked.append(int((most > 0).sum()))
            return super().propose(rows, most)

    # Tokens of few rows cost next to nothing, and those of many a lot.
    proposer = AdaptiveProposer(Counting(), StepCosts((1, 2, 4, 8, 16), [0.01, 0.0101, 0.0103, 0.08, 0.16]), num_rows=8)
    for row in range(8):
        proposer.admit(row, np.zeros(0, np.int32))
    run(proposer, list(range(8)), [0.5] * 8, 100)
    assert sum(asked) < 0.3 * 8 * 100
    asked.clear()
    made = run(proposer, [3], [1.0], 30)
    assert asked[0] == 1 and (made[5:] > 0).all()


def test_a_proposer_that_is_not_ready_yet_is_asked_again_at_once() -> None:
    class Late(Eager):
        is_free = False
        num_asked = 0

        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            self.num_asked += int(most.any())
            ready = self.num_asked > 5
            return super().propose(rows, most) if ready else Drafts.none(len(rows), int(most.max()))

    late = Late()
    proposer = AdaptiveProposer(late, StepCosts(SIZES, FLAT), num_rows=8)
    proposer.admit(3, np.zeros(0, np.int32))
    made = run(proposer, [3], [1.0], 12)[:, 0]
    assert (made[:5] == 0).all() and (made[5:] > 0).all()


COPY = 7
"""What `Copying` drafts."""


class Copying(NullProposer):
    """Drafts that cost nothing, each of which is right with this chance where the one before it was."""

    def __init__(self, chance: float) -> None:
        self._chance = chance

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        width = int(most.max())
        worth = np.tile(np.array([self._chance**depth for depth in range(1, width + 1)]), (len(rows), 1))
        return Drafts(np.full((len(rows), width), COPY), most.copy(), worth=worth)


def beside(chance: float, seconds: list[float] = FLAT, dear: NullProposer | None = None) -> AdaptiveProposer:
    proposer = AdaptiveProposer(dear or EagerAtACost(), StepCosts(SIZES, seconds), 8, free=Copying(chance))
    for row in range(8):
        proposer.admit(row, np.zeros(0, np.int32))
    return proposer


def first_drafts(proposer: AdaptiveProposer, drawn: int, steps: int) -> list[int]:
    """First drafts of a row whose tokens are all `drawn`; 0: none."""
    row, found = np.array([3]), list[int]()
    for _ in range(steps):
        drafts = proposer.propose(row, np.array([4]))
        found.append(int(drafts.tokens[0, 0]) if drafts.num[0] else 0)
        count = 1 + (int(drafts.num[0]) if found[-1] == drawn else 0)
        proposer.accept(row, np.full((1, 5), drawn), np.array([count]))
    return found


@pytest.mark.parametrize(("chance", "drawn"), [(0.95, COPY), (0.95, RIGHT), (0.05, RIGHT), (0.3, COPY)])
def test_a_row_takes_what_has_proved_right(chance: float, drawn: int) -> None:
    """Whatever the copies promise: what came of them counts."""
    assert first_drafts(beside(chance), drawn, 80)[-20:].count(drawn) >= 18


def test_who_takes_time_is_seldom_asked_where_copies_promise_as_much() -> None:
    class Counting(EagerAtACost):
        num_asked = 0

        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            self.num_asked += 1
            return super().propose(rows, most)

    dear = Counting()
    found = first_drafts(beside(0.95, dear=dear), COPY, 400)
    assert found.count(COPY) + dear.num_asked == 400
    assert 1 <= dear.num_asked < 20, "in tries alone: else it would never be known whether it has become better"


@pytest.mark.parametrize("chance", [0.35, 0.55, 0.65])
def test_a_head_that_becomes_better_than_the_copies_is_found_out(chance: float) -> None:
    rng, proposer, row = np.random.default_rng(2), beside(chance), np.array([3])
    drawn = 0
    for step in range(1200):
        right = 0.1 if step < 100 else 0.9
        drafts = proposer.propose(row, np.array([4]))
        from_head = drafts.num[0] > 0 and drafts.tokens[0, 0] == RIGHT
        hits = int((rng.random(4) < (right if from_head else chance)).cumprod().sum())
        accepted = min(hits, int(drafts.num[0]))
        tokens = np.full((1, 5), WRONG)
        tokens[0, :accepted] = drafts.tokens[0, :accepted]
        proposer.accept(row, tokens, np.array([accepted + 1]))
        drawn += (accepted + 1) * (step >= 900)
    assert drawn / 300 > 3.0, "a head that is right in 90 % gives 4.1 tokens a step"


@given(data=st.data())
def test_trees_and_copies_of_any_widths_go_together(data: st.DataObject) -> None:
    """Rows that sleep, rows near their limits, rows with copies and without, beside a tree that may be narrower."""
    num_rows, most_drafts = data.draw(st.integers(1, 3)), 6

    class Tree(NullProposer):
        is_free = False

        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            width = min(int(most.max()), data.draw(st.integers(1, most_drafts)))
            parents = np.tile(np.maximum(np.arange(-1, width - 1) - 1, -1), (len(rows), 1))
            worth = np.tile(np.array([0.7 * 0.9**place for place in range(width)]), (len(rows), 1))
            return Drafts(np.full((len(rows), width), RIGHT), np.minimum(most, width), parents, worth)

    class SomeCopies(Copying):
        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            drafts = super().propose(rows, most)
            there = np.array([data.draw(st.booleans()) for _ in rows])
            return Drafts(drafts.tokens, np.where(there, drafts.num, 0), worth=drafts.worth)

    proposer = AdaptiveProposer(Tree(), StepCosts(SIZES, FLAT), 8, data.draw(st.integers(1, 3)), SomeCopies(0.6))
    rows = np.arange(num_rows)
    for row in rows.tolist():
        proposer.admit(row, np.zeros(0, np.int32))
    for _ in range(8):
        most = np.array([data.draw(st.integers(0, most_drafts)) for _ in rows])
        proposer._asleep[rows] = [data.draw(st.booleans()) for _ in rows]
        drafts = proposer.propose(rows, most)
        assert (drafts.num <= most).all()
        assert (drafts.follows < np.arange(drafts.tokens.shape[1])).all()
        right = np.array([data.draw(st.booleans()) for _ in rows])
        tokens = np.full((num_rows, most_drafts + 1), RIGHT)
        proposer.accept(rows, tokens, 1 + np.where(right, np.minimum(drafts.num, 1), 0))


def test_copies_are_no_deeper_than_a_tree_may_be() -> None:
    proposer = AdaptiveProposer(EagerAtACost(), StepCosts(SIZES, FLAT), 8, tree_depth=2, free=Copying(0.95))
    proposer.admit(3, np.zeros(0, np.int32))
    assert proposer.propose(np.array([3]), np.array([6])).num.tolist() == [2]


@pytest.mark.parametrize(("seconds", "first"), [(0.0001, RIGHT), (0.004, COPY)])
def test_the_time_to_make_drafts_speaks_for_copies(seconds: float, first: int) -> None:
    """Both are right half of the time, the one a little more often."""
    slow = Slow(seconds)
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), 8, free=Copying(0.5), clock=lambda: slow.now)
    proposer.admit(3, np.zeros(0, np.int32))
    row, found = np.array([3]), list[int]()
    for step in range(200):
        drafts = proposer.propose(row, np.array([4]))
        found.append(int(drafts.tokens[0, 0]) if drafts.num[0] else 0)
        drawn = (RIGHT, COPY, RIGHT, WRONG, COPY, RIGHT, COPY, RIGHT)[step % 8]
        proposer.accept(row, np.full((1, 5), drawn), np.array([1 + (int(drafts.num[0]) if found[-1] == drawn else 0)]))
    assert found[-100:].count(first) > 50


def test_copies_are_taken_where_other_drafts_do_not_pay() -> None:
    """The other one is asleep, but for a try now and then, and the copies are little better than that."""
    proposer = beside(0.45)
    assert not first_drafts(proposer, WRONG, 300)[-50:].count(COPY)
    found = first_drafts(proposer, COPY, 300)[-50:]
    assert found.count(COPY) > 40


def test_rows_are_served_by_different_proposers_in_one_step() -> None:
    proposer, rows, both = beside(0.9), np.array([1, 2]), 0
    for step in range(100):
        drafts = proposer.propose(rows, np.array([4, 4]))
        first = np.where(drafts.num > 0, drafts.tokens[:, 0] if drafts.tokens.shape[1] else 0, 0)
        right = first == (RIGHT, COPY)
        tokens = np.repeat(np.array([[RIGHT], [COPY]]), 5, 1)
        proposer.accept(rows, tokens, 1 + np.where(right, drafts.num, 0))
        both += bool(right.all()) * (step >= 50)
    assert both > 40


def test_a_row_that_took_copies_has_more_to_catch_up_with_than_usual() -> None:
    """Catching up takes by the steps since it was last asked; a hundred of them are not what each step takes."""

    class Copying(NullProposer):
        num_left = 0

        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            self.num_left -= 1
            num = most if self.num_left > 0 else np.zeros_like(most)
            return Drafts(np.ones((len(rows), int(most.max())), np.int64), num)

    class Behind(Slow):
        num_steps = 0

        def catch_up(self, rows: IntArray) -> None:
            self.now += (0.0001 + 0.002 * self.num_steps) * len(rows)
            self.num_steps = 0

    slow, copies = Behind(0.0001), Copying()
    proposer = AdaptiveProposer(slow, StepCosts(SIZES, FLAT), num_rows=8, free=copies, clock=lambda: slow.now)
    proposer.admit(3, np.zeros(0, np.int32))
    run(proposer, [3], [0.9], 10)
    before = proposer._catch_up_seconds.mean
    for _ in range(5):
        copies.num_left, slow.num_steps = 100, 100
        run(proposer, [3], [1.0], 99)
        run(proposer, [3], [0.9], 3)
    assert proposer._catch_up_seconds.mean < 1.1 * before
