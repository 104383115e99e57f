"""The sentinel: which state a replica is in, what may happen to it there, and what is done about it. One table.

                       STARTED                  FAULT                        AUTO, RETRY, ...
            STARTING ───────────▶ HEALTHY ───────────────▶ UNHEALTHY ───────────────────────▶ RECOVERING
                                   ▲  │ DRAIN, REPLACE        │  ▲                              │  │
                                   │  ▼                       │  └────────── FAULT ─────────────┘  │
                         (STARTED) │ DRAINING ──EMPTY──▶ DRAINED ─────────RETRY, ...──▶ (RECOVERING)
                                   │ REPLACING ─EMPTY──▶ (RECOVERING)                               │
                                   └───────────────────────── STARTED ──────────────────────────────┘
                       GAVE_UP, RECOVERY_TIMEOUT, UNREAPABLE ──▶ DEAD       SCALE_DOWN ──▶ REMOVED

Pure and synchronous: it moves, and says what is to be done; `Replica` does it. A pair that the table does not name
changes nothing: a command is then refused with the state as the reason, any other event is late and is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """Of one replica."""

    STARTING = "starting"
    HEALTHY = "healthy"
    DRAINING = "draining"
    """Finishes its requests, takes no new ones, then rests."""
    REPLACING = "replacing"
    """As draining, but then gets a new worker."""
    DRAINED = "drained"
    """Out of service on purpose: it has no worker."""
    UNHEALTHY = "unhealthy"
    """Its worker is gone or is being ended; somebody must say how to go on."""
    RECOVERING = "recovering"
    """A new worker starts."""
    DEAD = "dead"
    REMOVED = "removed"

    @property
    def status(self) -> str:
        """`healthy`, `unhealthy` or `dead`: what clients of the fault-tolerance API know."""
        if self in (State.DEAD, State.REMOVED):
            return "dead"
        return "healthy" if self in SERVING else "unhealthy"


class Event(Enum):
    """What happens to a replica."""

    STARTED = "started"
    WORKER_ERROR = "worker error"
    WORKER_EXIT = "worker exit"
    HANG = "hang"
    PROTOCOL_FAULT = "protocol fault"
    LOOP_FAULT = "step loop fault"
    AUTO_RECOVER = "auto recover"
    GAVE_UP = "gave up"
    RECOVERY_TIMEOUT = "recovery timeout"
    UNREAPABLE = "unreapable"
    EMPTY = "empty"
    RETRY = "retry"
    RESTART_WORKERS = "restart_workers"
    SCALE_DOWN = "scale_down"
    DRAIN = "drain"
    REPLACE = "replace"


class Action(Enum):
    """What the replica does on arriving in its next state."""

    IGNORE = "ignore"
    REFUSE = "refuse"
    SERVE = "serve"
    """(Re)admit every request and schedule."""
    END_EPOCH = "end epoch"
    """Kill and reap the worker, take what it has published, let the rest go."""
    RESPAWN = "respawn"
    """A new epoch, with whatever survived: weights in memory, a warm spare."""
    RESPAWN_FRESH = "respawn fresh"
    """A new epoch that trusts nothing of the last one: weights are read again."""
    STOP_ADMISSION = "stop admission"
    RETIRE = "retire"
    """The worker is asked to end."""
    HAND_OVER = "hand over"
    """Its requests go to other replicas."""
    BURY = "bury"
    """It ends for good: worker killed, requests handed over or failed."""


SERVING = frozenset({State.HEALTHY, State.DRAINING, State.REPLACING})
"""States in which steps are scheduled."""
FAULTS = (Event.WORKER_ERROR, Event.WORKER_EXIT, Event.HANG, Event.PROTOCOL_FAULT, Event.LOOP_FAULT)
COMMANDS = (Event.RETRY, Event.RESTART_WORKERS, Event.SCALE_DOWN, Event.DRAIN, Event.REPLACE)
ENDINGS = (Event.GAVE_UP, Event.RECOVERY_TIMEOUT, Event.UNREAPABLE)


class Move(NamedTuple):
    next: State
    action: Action


def _moves(events: Iterable[Event], state: State, action: Action) -> dict[Event, Move]:
    return dict.fromkeys(events, Move(state, action))


_RESTARTS = {
    Event.RETRY: Move(State.RECOVERING, Action.RESPAWN),
    Event.RESTART_WORKERS: Move(State.RECOVERING, Action.RESPAWN_FRESH),
    Event.REPLACE: Move(State.RECOVERING, Action.RESPAWN_FRESH),
    Event.SCALE_DOWN: Move(State.REMOVED, Action.BURY),
}
_TABLE: dict[State, dict[Event, Move]] = {
    State.STARTING: {
        Event.STARTED: Move(State.HEALTHY, Action.SERVE),
        **_moves((*FAULTS, *ENDINGS), State.DEAD, Action.BURY),
    },
    State.HEALTHY: {
        **_moves(FAULTS, State.UNHEALTHY, Action.END_EPOCH),
        Event.DRAIN: Move(State.DRAINING, Action.STOP_ADMISSION),
        Event.REPLACE: Move(State.REPLACING, Action.STOP_ADMISSION),
    },
    State.DRAINING: {
        **_moves(FAULTS, State.UNHEALTHY, Action.END_EPOCH),
        Event.EMPTY: Move(State.DRAINED, Action.RETIRE),
        Event.REPLACE: Move(State.REPLACING, Action.STOP_ADMISSION),
    },
    State.REPLACING: {
        **_moves(FAULTS, State.UNHEALTHY, Action.END_EPOCH),
        Event.EMPTY: Move(State.RECOVERING, Action.RESPAWN),
    },
    State.DRAINED: {**_RESTARTS},
    State.UNHEALTHY: {
        **_RESTARTS,
        **_moves(ENDINGS, State.DEAD, Action.BURY),
        Event.AUTO_RECOVER: Move(State.RECOVERING, Action.RESPAWN),
        Event.DRAIN: Move(State.DRAINED, Action.HAND_OVER),
    },
    State.RECOVERING: {
        Event.STARTED: Move(State.HEALTHY, Action.SERVE),
        **_moves(FAULTS, State.UNHEALTHY, Action.END_EPOCH),
        **_moves(ENDINGS, State.DEAD, Action.BURY),
    },
    State.DEAD: {Event.SCALE_DOWN: Move(State.REMOVED, Action.IGNORE)},
    State.REMOVED: {},
}


def transition(state: State, event: Event) -> Move:
    """The whole product of states and events."""
    if move := _TABLE[state].get(event):
        return move
    return Move(state, Action.REFUSE if event in COMMANDS else Action.IGNORE)


class Sentinel:
    """Where one replica stands."""

    def __init__(self) -> None:
        self.state = State.STARTING

    def on(self, event: Event) -> Action:
        self.state, action = transition(self.state, event)
        return action
