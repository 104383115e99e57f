"""How soon, and how often, a worker is started again: at once at first, then with growing pauses, then no more.

Only epochs that came to nothing count: one that delivered a token, or served for a while, proves that the machine can.
"""

from __future__ import annotations

_DELAYS_S = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)
"""Before the n-th start in a row that follows an epoch which came to nothing."""
_LONG_ENOUGH_S = 60.0
_MOST_CONDEMNED = 3


class RestartPolicy:
    """Clock readings are passed in."""

    def __init__(self) -> None:
        self.num_fruitless = 0
        self._num_condemned = 0
        """Requests that were given up since anybody got a token."""
        self._serving_since: float | None = None

    def serving(self, now: float) -> None:
        """A worker is ready."""
        self._serving_since = now

    def progressed(self) -> None:
        """A token was delivered."""
        self.num_fruitless = self._num_condemned = 0

    def learned(self, condemned: bool) -> None:
        """A death has taught something of who is guilty. Where that never helps, it is not the requests."""
        if self._num_condemned < _MOST_CONDEMNED:
            self.num_fruitless = 0
        self._num_condemned += condemned

    def next_delay_s(self, now: float) -> float | None:
        """An epoch has ended: seconds to wait before the next one, or None: this is a crash loop, give up."""
        if self._serving_since is not None and now - self._serving_since > _LONG_ENOUGH_S:
            self.num_fruitless = 0
        self._serving_since = None
        self.num_fruitless += 1
        return _DELAYS_S[self.num_fruitless - 1] if self.num_fruitless <= len(_DELAYS_S) else None
