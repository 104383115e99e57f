"""The router: bounded load first, then the longest known prefix, then the session, then the lower load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipring.runtime.router import Candidate, Router


def candidate(rank: int, running: int = 0, waiting: int = 0, matching: int = 0) -> Candidate:
    return Candidate(rank, running, waiting, matching)


def test_waiting_weighs_four_times_running() -> None:
    assert Router(0).choose([candidate(0, waiting=1), candidate(1, running=3)]) == 1
    assert Router(0).choose([candidate(0, waiting=1), candidate(1, running=5)]) == 0


def test_a_known_prefix_wins_within_the_slack_only() -> None:
    assert Router(8).choose([candidate(0, running=8, matching=1), candidate(1)]) == 0
    assert Router(8).choose([candidate(0, running=9, matching=1), candidate(1)]) == 1


def test_a_session_stays_where_it_was_unless_a_prefix_says_otherwise() -> None:
    router = Router(8)
    first = router.choose([candidate(0, running=1), candidate(1)], "s")
    assert first == 1
    assert router.choose([candidate(0), candidate(1, running=4)], "s") == 1
    assert router.choose([candidate(0, matching=2), candidate(1, running=4)], "s") == 0
    assert router.choose([candidate(0, running=3), candidate(1)], "s") == 0, "its home has moved"


def test_equals_take_turns() -> None:
    router = Router(8)
    assert sorted(router.choose([candidate(0), candidate(1), candidate(2)]) for _ in range(3)) == [0, 1, 2]


loads = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9))


@given(st.lists(st.lists(loads, min_size=1, max_size=4), min_size=1, max_size=20), st.integers(0, 30))
def test_nobody_above_the_bound_is_chosen(rounds: list[list[tuple[int, int, int]]], slack: int) -> None:
    router = Router(slack)
    for each in rounds:
        candidates = [Candidate(rank, *load) for rank, load in enumerate(each)]
        chosen = candidates[router.choose(candidates, "s")]
        least = min(other.load for other in candidates)
        assert chosen.load <= least + slack
        assert not any(o.load <= least + slack and o.num_matching > chosen.num_matching for o in candidates)
