"""`Fault`: why an epoch ends, for those who act on it, record it and tell of it."""

from __future__ import annotations

from dataclasses import dataclass

from slipring.runtime.supervisor import Event


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an epoch ends."""

    event: Event
    reason: str
    explained: bool = False
    """The worker itself said why, so that its last lines add nothing."""
    traceback: str = ""
    silent_s: float = 0.0
    """How long nothing had been heard of the worker when the fault was seen, if it was computing."""
    limit_s: float = 0.0
    """Of a hang: how long that might have been."""
    at: float = 0.0
    """Monotonic time."""
