"""When to publish the next step while one still runs.

Publishing early keeps the device busy; publishing late lets a request that arrives meanwhile join the step instead
of queueing behind it. So the next step goes out a short lead before the running one's predicted end, and at once
where steps are shorter than the lead, or nothing is known about their length yet.
"""

from __future__ import annotations

from collections import deque

from slipring.scheduler.step import Step
from slipring.scheduler.step_cost import StepCost
from slipring.shm.wire import StepInputView

_LEAD_S = 0.003
_LEAD_SHARE = 0.1
"""The lead grows with the step, since so does the error of its prediction."""


class Pacer:
    """Clock readings are passed in. Steps come back in the order in which they went out."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._in_flight: deque[tuple[int, int, int, float]] = deque()
        self._ends_at = 0.0
        """Predicted end of the newest step in flight."""
        self._began_at = 0.0
        """When the oldest step in flight began: at its publication, or when the one before it came back."""
        self.num_context = 0
        """Attended positions of the newest step."""

    def published(self, step: Step, now: float) -> float:
        """A step went out; returns its predicted duration in seconds, 0 while nothing is known."""
        num, num_rows = step.num_decode, step.num_rows
        view: StepInputView = step.view
        self.num_context = int(view.start[:num_rows].sum()) + num
        predicted = self.cost.predict(num, step.num_chunk_tokens, self.num_context)
        if not self._in_flight:
            self._began_at = self._ends_at = now
        self._in_flight.append((num, step.num_chunk_tokens, self.num_context, predicted))
        self._ends_at += predicted
        return predicted

    def returned(self, now: float) -> None:
        """The oldest step is back: learn what it cost, and correct the predictions by how wrong this one was."""
        num, chunk, context, _ = self._in_flight.popleft()
        self.cost.observe(num, chunk, context, now - self._began_at)
        self._began_at = now
        self._ends_at = now + sum(predicted for *_, predicted in self._in_flight)

    def publish_at(self) -> float:
        """The earliest time to publish on top of the steps in flight; in the past where steps are short."""
        predicted = self._in_flight[-1][3] if self._in_flight else 0.0
        return self._ends_at - max(_LEAD_S, _LEAD_SHARE * predicted)
