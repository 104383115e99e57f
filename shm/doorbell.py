"""Waiting beside a ring: a short adaptive spin, then sleep on an eventfd.

The ringing side always writes the eventfd; it never guesses whether the other side sleeps (a store and the load
that follows it may be reordered even on x86, and that loses wake-ups). The event loop waits with `add_reader`; a
worker waits with `Doorbell.wait`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from slipring.shm.ring import MAY_SPIN


class Doorbell:
    """An eventfd. Create it in the engine, pass `fd` to the child, and wrap it there with `Doorbell(fd)`."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Take back every ring so far. Clear first, then look at the ring: the other order loses wake-ups."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)


class Waiter:
    """A worker's wait for its ring: spins while spinning has lately paid, sleeps otherwise.

    The spin doubles (up to `max_spin_us`) when work came while spinning and halves when it did not, so that an
    idle worker uses no CPU and a decoding one is picked up in about a microsecond.
    """

    _MIN_SPIN_US = 1.0

    def __init__(self, doorbell: Doorbell, max_spin_us: int, also_watch: int | None = None) -> None:
        """`also_watch` is a descriptor that ends the wait when it becomes readable (the lifeline)."""
        self._doorbell = doorbell
        self._max_spin_us = float(max_spin_us) if MAY_SPIN else 0.0
        self._spin_us = self._max_spin_us
        self._poll = select.poll()
        self._poll.register(doorbell.fd, select.POLLIN)
        self._lifeline = also_watch
        if also_watch is not None:
            self._poll.register(also_watch, select.POLLIN)

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """True once `ready()` holds; False when the lifeline ended or `timeout_s` passed."""
        if self._spin(ready):
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._doorbell.clear()
            if ready():
                return True
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._poll.poll(None if left is None else left * 1e3)
            if any(fd == self._lifeline for fd, _ in events):
                return False
            if not events and left is not None:
                return ready()

    def _spin(self, ready: Callable[[], bool]) -> bool:
        end = time.perf_counter_ns() + int(self._spin_us * 1e3)
        while time.perf_counter_ns() < end:
            if ready():
                self._spin_us = min(self._max_spin_us, self._spin_us * 2)
                return True
        self._spin_us = max(min(self._MIN_SPIN_US, self._max_spin_us), self._spin_us / 2)
        return ready()
