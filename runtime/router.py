"""Which replica takes a request. Pure.

Load comes first, as a bound: a replica whose load exceeds the least by more than a slack is out. Among the others the
longest known prefix wins (the replicas' own indexes are asked, so this is exact), then the session's last replica, then
the lower load, then whoever was not chosen for the longest time. Waiting requests weigh four times running ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_WAITING_WEIGHT = 4
_MOST_SESSIONS = 65_536


@dataclass(frozen=True, slots=True)
class Candidate:
    rank: int
    num_running: int
    num_waiting: int
    num_matching: int
    """Leading blocks of the prompt that its prefix index holds."""

    @property
    def load(self) -> int:
        return _WAITING_WEIGHT * self.num_waiting + self.num_running


class Router:
    def __init__(self, slack: int) -> None:
        """`slack`: how much more load than the least a known prefix is worth."""
        self._slack = slack
        self._rank_of: OrderedDict[str, int] = OrderedDict()
        """Sessions, least recently used first."""
        self._last_chosen: dict[int, int] = {}
        self._num_chosen = 0

    def choose(self, candidates: Sequence[Candidate], session: str | None = None) -> int:
        """The rank that takes a request. There must be a candidate."""
        home = self._rank_of.get(session, -1) if session is not None else -1
        limit = min(candidate.load for candidate in candidates) + self._slack
        chosen = min(
            (candidate for candidate in candidates if candidate.load <= limit),
            key=lambda candidate: (
                -candidate.num_matching,
                candidate.rank != home,
                candidate.load,
                self._last_chosen.get(candidate.rank, -1),
            ),
        )
        self._remember(chosen.rank, session)
        return chosen.rank

    def _remember(self, rank: int, session: str | None) -> None:
        self._num_chosen += 1
        self._last_chosen[rank] = self._num_chosen
        if session is not None:
            self._rank_of[session] = rank
            self._rank_of.move_to_end(session)
            if len(self._rank_of) > _MOST_SESSIONS:
                self._rank_of.popitem(last=False)
