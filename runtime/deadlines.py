"""When a worker that says nothing is to be called hung.

A step's clock runs from its publication, or from the previous step's return if that was later; it stops when the step
is back. It may take max(hang limit, 10 x its predicted time). A worker that starts has a limit on its silence for
each phase. There is one timer while something is awaited, and it is not set anew with each step: when it fires too
early it is set again for what is left. Only where a step has less time than the timer says is it set sooner. An idle
worker is awaited by nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from slipring.runtime.epoch import Epoch
from slipring.shm.layout import Phase

_PREDICTION_MARGIN = 10.0
_FORGIVEN_LAG_S = 0.5
"""A timer that fires so late says that this process stood still (stopped, swapped out), and perhaps the worker too."""
_SILENCE_S = {Phase.STARTING: 60.0, Phase.LOADING: 120.0, Phase.COMPILING: 300.0, Phase.CAPTURING: 300.0}
"""How long a worker that starts may go without a sign of life."""


class StepDeadline:
    def __init__(self, hang_limit_s: float, epoch: Epoch, on_overdue: Callable[[str, float, float], None]) -> None:
        """`on_overdue(words, silent_s, limit_s)` is called once the deadline has passed; it may be called again."""
        self._hang_limit_s = hang_limit_s
        self._epoch = epoch
        self._on_overdue = on_overdue
        self._limits: deque[float] = deque()
        """Of the steps in flight, oldest first."""
        self._began = 0.0
        self._is_starting = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._due = 0.0
        self._loop = asyncio.get_running_loop()

    def starting(self) -> None:
        """The worker was spawned."""
        self._is_starting, self._began = True, time.monotonic()
        self._set(1.0)

    def ready(self) -> None:
        self._is_starting = False

    def published(self, predicted_s: float, now: float) -> None:
        if not self._limits:
            self._began = now
        self._limits.append(max(self._hang_limit_s, _PREDICTION_MARGIN * predicted_s))
        self._await_step()

    def returned(self, now: float) -> None:
        """The oldest step is back."""
        self._limits.popleft()
        self._began = now
        if self._limits:
            self._await_step()

    def cancel(self) -> None:
        """Nobody is to be judged any more."""
        self._is_over, self._on_overdue = True, _not_told
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _await_step(self) -> None:
        """The timer fires no later than the oldest step is due."""
        due = self._began + self._limits[0]
        if self._is_over or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._set(max(due - time.monotonic(), 0.001))

    def _set(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        if now - self._due > _FORGIVEN_LAG_S:
            self._began = now
        if self._is_starting:
            self._check_start(now)
        elif self._limits:
            self._check_step(now)

    def _check_step(self, now: float) -> None:
        if self._began + self._limits[0] <= now:
            self._on_overdue(self._describe_step(now), now - self._began, self._limits[0])
        if self._limits and not self._is_over:
            self._set(max(self._began + self._limits[0] - now, 0.001))

    def _check_start(self, now: float) -> None:
        state = self._epoch.steps.reader_state(0)
        silent_s = now - max(self._began, state.heartbeat_ns / 1e9)
        limit_s = _SILENCE_S.get(state.phase, self._hang_limit_s)
        if silent_s > limit_s:
            words = f"no sign of life for {silent_s:.1f} s while {state.phase.name.lower()}"
            self._on_overdue(words, silent_s, limit_s)
        if not self._is_over:
            self._set(1.0)

    def _describe_step(self, now: float) -> str:
        state = self._epoch.steps.reader_state(0)
        overdue = f"a step is not back after {now - self._began:.1f} s (limit {self._limits[0]:.1f} s)"
        if state.phase is Phase.WAITING:
            return f"{overdue}, and it was never picked up"
        heard_s = now - state.heartbeat_ns / 1e9
        return f"{overdue}; the worker is {state.phase.name.lower()}, last heard of {heard_s:.1f} s ago"


def _not_told(words: str, silent_s: float, limit_s: float) -> None:
    """Instead of a callback that holds its owner, which holds the deadline."""
