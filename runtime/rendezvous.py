"""Where the workers of a group meet: an address that is really free, and a new one for each epoch.

The engine binds the socket itself and hands it down, unheard of until the worker that serves the group's store listens
on it (torch's `TCPStore` takes it as `master_listen_fd`); the others connect to host and port. So nobody else can take
the port in between, and what is left of an old epoch, should it wake up, knocks where nobody meets any more.

A group of one worker meets nobody. It is given its address all the same: what a group is told does not depend on its
size.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import deque
from dataclasses import dataclass

_NUM_STALE = 64
_MOST_TRIES = 2 * _NUM_STALE


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Bound, not listening."""

    host: str
    port: int
    socket: socket.socket

    @property
    def fd(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Idempotent."""
        self.socket.close()


class Rendezvous:
    """One per node."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._next: MeetingPoint | None = None
        """Named by somebody, for the next who asks."""
        self._stale: deque[int] = deque(maxlen=_NUM_STALE)
        """Ports that were handed out last, which the kernel might give again at once."""

    def reserve(self) -> MeetingPoint:
        """For one group in one epoch; whoever asks closes it. Raises OSError when there is no free port."""
        point, self._next = self._next or self._fresh(), None
        self._stale.append(point.port)
        return point

    def move(self, host: str, port: int) -> None:
        """Meet at this address of this node from now on: the next group at this port, later ones at fresh ports.

        Raises OSError when that cannot be; then nothing has changed.
        """
        point = _bind(host, port)
        self.close()
        self._host, self._next = host, point

    def close(self) -> None:
        """Idempotent."""
        if self._next is not None:
            self._next.close()
            self._next = None

    def _fresh(self) -> MeetingPoint:
        for _ in range(_MOST_TRIES):
            point = _bind(self._host, 0)
            if point.port not in self._stale:
                return point
            point.close()
        raise OSError(f"no port of {self._host} is free that was not used just now")


def _bind(host: str, port: int) -> MeetingPoint:
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return MeetingPoint(host, bound.getsockname()[1], bound)
