"""The search for a guilty request, against a model of workers that die whenever they compute it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.runtime.suspects import Suspects
from slipring.scheduler.request import Request
from slipring.shm.params import SamplingParams


@dataclass
class Owner:
    token_ids: list[int] = field(default_factory=list)


def requests(count: int) -> list[Request]:
    return [Request(np.arange(3, dtype=np.int32), SamplingParams(max_tokens=9), owner=Owner()) for _ in range(count)]


def search(everybody: list[Request], guilty: Request, batch: int) -> tuple[Request | None, int]:
    """Run in batches until the guilty one is found; returns it and the number of deaths."""
    suspects = Suspects()
    for deaths in range(1, 40):
        line = [request for request in everybody if not suspects.holds_back(request)]
        while True:
            computed = line[:batch]
            if guilty in computed:
                break
            for request in computed:
                request.owner.token_ids.append(1)
            line = line[batch:] + computed + suspects.progressed()
        _, found = suspects.died(computed)
        if found is not None:
            return found, deaths
    return None, 40


@given(st.integers(1, 64), st.data())
def test_the_guilty_one_is_found_and_nobody_else(count: int, data: st.DataObject) -> None:
    everybody = requests(count)
    guilty = everybody[data.draw(st.integers(0, count - 1))]
    found, deaths = search(everybody, guilty, batch=count)
    assert found is guilty
    assert deaths <= 3 + np.ceil(np.log2(count))


@given(st.integers(1, 40), st.integers(1, 16), st.data())
def test_also_where_a_step_holds_only_some(count: int, batch: int, data: st.DataObject) -> None:
    everybody = requests(count)
    guilty = everybody[data.draw(st.integers(0, count - 1))]
    assert search(everybody, guilty, batch)[0] is guilty


def test_whoever_makes_progress_between_deaths_is_never_suspected() -> None:
    suspects, everybody = Suspects(), requests(4)
    for _ in range(20):
        assert suspects.died(everybody) == (False, None)
        for request in everybody:
            request.owner.token_ids.append(1)
        assert suspects.progressed() == [] and not suspects.is_searching


def test_a_suspect_that_ends_makes_room_for_the_next_trial() -> None:
    suspects, (a, b, c) = Suspects(), requests(3)
    suspects.died([a, b, c])
    assert suspects.died([a, b, c]) == (True, None)
    assert [suspects.holds_back(request) for request in (a, b, c)] == [False, False, True]
    assert suspects.forget(a) == []
    assert suspects.forget(b) == [c] and not suspects.holds_back(c)
    assert suspects.forget(c) == [] and not suspects.is_searching


def test_a_death_under_others_teaches_nothing() -> None:
    suspects, (a, b) = Suspects(), requests(2)
    suspects.died([a])
    suspects.died([a])
    assert suspects.died([b]) == (False, None)
    assert suspects.died([a]) == (True, a)


def test_whoever_comes_from_a_dead_replica_is_tried_alone() -> None:
    suspects, (a, b, c, beside) = Suspects(), requests(4)
    assert [suspects.met(request) for request in (a, b, c)] == [True, False, False]
    a.owner.token_ids.append(1)
    assert suspects.progressed() == [b] and suspects.holds_back(c)
    assert suspects.died([a, b, beside]) == (False, None), "one death here may have come from outside"
    assert suspects.suspects(b) and not suspects.holds_back(b) and suspects.holds_back(c)
    for request in (a, beside):
        request.owner.token_ids.append(1)
    assert suspects.died([a, b, beside]) == (True, b)
    assert not suspects.holds_back(c)


def test_whoever_comes_from_a_dead_replica_goes_free_if_one_death_here_came_from_outside() -> None:
    suspects, (a, beside) = Suspects(), requests(2)
    assert suspects.met(a) and suspects.died([a, beside]) == (False, None)
    a.owner.token_ids.append(1)
    assert suspects.progressed() == [] and not suspects.is_searching
    assert suspects.died([a, beside]) == (True, None), "beside got nothing, and is a suspect as anybody else is"
    assert suspects.died([a, beside]) == (True, beside)


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_the_guilty_one_beside_whoever_comes_from_a_dead_replica_is_found(is_in_flight: bool) -> None:
    suspects, (a, guilty, beside) = Suspects(), requests(3)
    assert suspects.met(a)
    under = [a, guilty, beside] if is_in_flight else [guilty, beside]
    assert suspects.died(under) == (False, None)
    beside.owner.token_ids.append(1)
    assert suspects.died(under) == (True, None)
    found, deaths = None, 0
    while found is None:
        if suspects.holds_back(guilty):
            for request in (a, beside):
                if not suspects.holds_back(request):
                    request.owner.token_ids.append(1)
            assert suspects.progressed()
        else:
            found, deaths = suspects.died([each for each in under if not suspects.holds_back(each)])[1], deaths + 1
    assert found is guilty and deaths == 1
    a.owner.token_ids.append(1)
    suspects.progressed()
    assert not suspects.is_searching


@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_held_and_tried_are_everybody(count: int) -> None:
    suspects, everybody = Suspects(), requests(count)
    suspects.died(everybody)
    suspects.died(everybody)
    released = [request for request in everybody if not suspects.holds_back(request)]
    while suspects.is_searching:
        for request in released:
            request.owner.token_ids.append(1)
        released = suspects.progressed()
    assert not any(suspects.holds_back(request) for request in everybody)
