"""Waiting beside a ring: a short adaptive spin, then sleep on an eventfd.

The ringing side always writes the eventfd; it never guesses whether the other side sleeps (a store and the load
that follows it may be reordered even on x86, and that loses wake-ups). A worker waits with `Waiter`, the event loop
with `LoopWaiter`.
"""

from __future__ import annotations

import asyncio
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

    def wake(self) -> None:
        """Make whoever waits here look again; for other threads of the same process."""
        self._doorbell.ring()

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


class LoopWaiter:
    """The event loop's wait for its ring: `add_reader` on the doorbell, and a short adaptive poll before that.

    The poll is one look at the ring per turn of the loop, never a block: while it lasts the loop does not sleep, and
    serves its sockets as ever. Like a worker's spin it doubles when it paid and halves when it did not, so that an
    idle engine sleeps and one with long steps looks once.
    """

    _MIN_SPIN_US = 1.0

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        doorbell: Doorbell,
        ready: Callable[[], bool],
        on_ready: Callable[[], None],
        max_spin_us: int,
    ) -> None:
        """`on_ready` is called when the doorbell rang (perhaps for what was taken already) or when `ready()` holds."""
        self._loop = loop
        self._doorbell = doorbell
        self._ready = ready
        self._on_ready = on_ready
        self._max_spin_us = self._spin_us = float(max_spin_us) if MAY_SPIN else 0.0
        self._poll_until_ns = 0
        self._polling = False
        loop.add_reader(doorbell.fd, self._on_ring)

    def expect(self) -> None:
        """Something was sent; an answer may come soon."""
        self._poll_until_ns = time.perf_counter_ns() + int(self._spin_us * 1e3)
        if not self._polling and self._max_spin_us:
            self._polling = True
            self._loop.call_soon(self._poll)

    def close(self) -> None:
        """`on_ready` is not called any more."""
        self._loop.remove_reader(self._doorbell.fd)
        self._max_spin_us = self._poll_until_ns = 0
        # They hold who made them, and that one us: nothing but the cycle collector would part the two.
        self._ready, self._on_ready = lambda: False, lambda: None

    def _poll(self) -> None:
        if self._ready():
            self._spin_us = min(self._max_spin_us, self._spin_us * 2)
            self._polling = False
            self._on_ready()
        elif time.perf_counter_ns() < self._poll_until_ns:
            self._loop.call_soon(self._poll)
        else:
            self._spin_us = max(min(self._MIN_SPIN_US, self._max_spin_us), self._spin_us / 2)
            self._polling = False

    def _on_ring(self) -> None:
        self._doorbell.clear()
        self._on_ready()
