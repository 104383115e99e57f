"""The waiting line: a heap by urgency, with lazy removal.

Both policies are a key. fcfs: order of arrival. priority: level first, with linear ageing, under which the order of
two requests never changes while they wait, so the key is fixed at arrival: `priority * age_s + arrival`. A preempted
request keeps its key and so returns to where it belongs, before everything that came after it.
"""

from __future__ import annotations

import heapq

from slipring.scheduler.request import Request, RequestStatus


class WaitingQueue:
    def __init__(self, policy: str, priority_age_s: float) -> None:
        self._by_priority = policy == "priority"
        self._age_s = priority_age_s
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._waiting: dict[int, Request] = {}
        self._num_seen = 0
        self.num_tokens = 0
        """Tokens of all that wait."""

    def __contains__(self, request: Request) -> bool:
        return id(request) in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def key(self, request: Request) -> tuple[float, int]:
        """The request's place in line; unique."""
        self._num_seen += 1
        level = request.priority * self._age_s + request.arrival if self._by_priority else 0.0
        return level, self._num_seen

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.key, request))
        self._waiting[id(request)] = request
        self.num_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Take it out of line, wherever it stands, if it does. Its heap entry goes when it surfaces."""
        if self._waiting.pop(id(request), None) is not None:
            self.num_tokens -= len(request.token_ids)

    def peek(self) -> Request | None:
        """The most urgent request, still in line."""
        while self._heap:
            request = self._heap[0][1]
            if id(request) in self._waiting and request.status is RequestStatus.WAITING:
                return request
            heapq.heappop(self._heap)
        return None

    def set_aside(self) -> Request:
        """Pop the most urgent request's entry without taking it out of line; `restore` puts it back."""
        return heapq.heappop(self._heap)[1]

    def restore(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.key, request))

    def requests(self) -> list[Request]:
        return list(self._waiting.values())
