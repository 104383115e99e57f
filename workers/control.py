"""The worker's side thread: answers control messages (`shm/control.py`) while the main thread runs steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from slipring.shm.control import ControlEnd, Message
from slipring.shm.doorbell import Waiter
from slipring.shm.grammar import deep_stacks

Handler = Callable[[Message], Message | None]
"""One message to its answer."""


class ControlThread:
    """Ends with the process. What `handle` raises goes to `on_failure`, and nothing is answered any more."""

    def __init__(
        self, end: ControlEnd, waiter: Waiter, handle: Handler, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._end, self._waiter, self._handle, self._on_failure = end, waiter, handle, on_failure
        self._posted: deque[Message] = deque()
        with deep_stacks():  # what is handled may be a grammar
            threading.Thread(target=self._run, name="control", daemon=True).start()

    def post(self, message: Message) -> None:
        """Send an answer that took longer, from any thread."""
        self._posted.append(message)
        self._waiter.wake()

    def _run(self) -> None:
        try:
            while self._waiter.wait(self._has_something_to_do):
                while self._posted:
                    self._end.send(self._posted.popleft())
                for message in self._end.receive():
                    if (answer := self._handle(message)) is not None:
                        self._end.send(answer)
        except BaseException as error:
            self._on_failure(error)

    def _has_something_to_do(self) -> bool:
        return bool(self._posted) or self._end.has_come()
