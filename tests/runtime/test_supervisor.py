"""The sentinel's table: the whole product of states and events, and what must hold on every path through it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.runtime.supervisor import COMMANDS, ENDINGS, FAULTS, SERVING, Action, Event, Sentinel, State, transition

REACHED = {
    (State.STARTING, Event.STARTED): (State.HEALTHY, Action.SERVE),
    (State.HEALTHY, Event.DRAIN): (State.DRAINING, Action.STOP_ADMISSION),
    (State.HEALTHY, Event.REPLACE): (State.REPLACING, Action.STOP_ADMISSION),
    (State.DRAINING, Event.EMPTY): (State.DRAINED, Action.RETIRE),
    (State.DRAINING, Event.REPLACE): (State.REPLACING, Action.STOP_ADMISSION),
    (State.REPLACING, Event.EMPTY): (State.RECOVERING, Action.RESPAWN),
    (State.DRAINED, Event.RETRY): (State.RECOVERING, Action.RESPAWN),
    (State.DRAINED, Event.RESTART_WORKERS): (State.RECOVERING, Action.RESPAWN_FRESH),
    (State.DRAINED, Event.REPLACE): (State.RECOVERING, Action.RESPAWN_FRESH),
    (State.DRAINED, Event.SCALE_DOWN): (State.REMOVED, Action.BURY),
    (State.UNHEALTHY, Event.RETRY): (State.RECOVERING, Action.RESPAWN),
    (State.UNHEALTHY, Event.RESTART_WORKERS): (State.RECOVERING, Action.RESPAWN_FRESH),
    (State.UNHEALTHY, Event.REPLACE): (State.RECOVERING, Action.RESPAWN_FRESH),
    (State.UNHEALTHY, Event.SCALE_DOWN): (State.REMOVED, Action.BURY),
    (State.UNHEALTHY, Event.DRAIN): (State.DRAINED, Action.HAND_OVER),
    (State.UNHEALTHY, Event.AUTO_RECOVER): (State.RECOVERING, Action.RESPAWN),
    (State.RECOVERING, Event.STARTED): (State.HEALTHY, Action.SERVE),
    (State.DEAD, Event.SCALE_DOWN): (State.REMOVED, Action.IGNORE),
}
for _event in FAULTS:
    REACHED[State.STARTING, _event] = (State.DEAD, Action.BURY)
    for _state in (State.HEALTHY, State.DRAINING, State.REPLACING, State.RECOVERING):
        REACHED[_state, _event] = (State.UNHEALTHY, Action.END_EPOCH)
for _event in ENDINGS:
    for _state in (State.STARTING, State.UNHEALTHY, State.RECOVERING):
        REACHED[_state, _event] = (State.DEAD, Action.BURY)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_the_whole_product(state: State, event: Event) -> None:
    unmoved = (state, Action.REFUSE if event in COMMANDS else Action.IGNORE)
    assert tuple(transition(state, event)) == REACHED.get((state, event), unmoved)


@given(st.lists(st.sampled_from(Event)))
def test_every_path(events: list[Event]) -> None:
    sentinel = Sentinel()
    for event in events:
        before = sentinel.state
        action = sentinel.on(event)
        moved = sentinel.state is not before
        assert moved or action in (Action.IGNORE, Action.REFUSE)
        assert before not in (State.DEAD, State.REMOVED) or sentinel.state in (State.DEAD, State.REMOVED)
        if sentinel.state in SERVING and before not in SERVING:
            assert event is Event.STARTED and action is Action.SERVE
        if before in SERVING and event in FAULTS:
            assert action is Action.END_EPOCH and sentinel.state is State.UNHEALTHY
        if action is Action.REFUSE:
            assert event in COMMANDS


def test_clients_know_three_statuses() -> None:
    assert {state: state.status for state in State} == {
        State.STARTING: "unhealthy", State.HEALTHY: "healthy", State.DRAINING: "healthy", State.REPLACING: "healthy",
        State.DRAINED: "unhealthy", State.UNHEALTHY: "unhealthy", State.RECOVERING: "unhealthy", State.DEAD: "dead",
        State.REMOVED: "dead",
    }  # fmt: skip
