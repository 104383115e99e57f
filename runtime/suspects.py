"""Finding the request that kills workers, when one does. Pure.

Suspects are the requests that the steps in flight at a worker's death were computing. A request is struck when a
worker dies under it and it has not got a token since the death before: whoever makes progress between two deaths is
not what they have in common. At the second death the struck ones become suspects. From then on they, and they alone,
are held back, and tried in halves beside everybody else:

    the worker dies under the tried ones    the guilty one is among them: halve them (only one left: found)
    each of the tried ones gets a token     they are innocent, the guilty one is held back: try half of the next group

n suspects take at most log2(n) + 1 further deaths. Nobody is tried and held back at once.

Whoever comes from a dead replica whose last worker died under it, and has got no token since, is tried alone. It is not
guilty by the first death here, which may have come from outside, or from somebody beside it: only by one that strikes
it. One that strikes others begins a search among these, and it is one of them if it was struck too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slipring.scheduler.request import Request


class Suspects:
    def __init__(self) -> None:
        self._under_last_death: dict[Request, int] = {}
        self._tried: dict[Request, int] = {}
        """And how many tokens each had when its trial began."""
        self._held: list[list[Request]] = []
        """Groups that wait for their trial; the next one stands last."""
        self._adopted: set[Request] = set()
        """Those tried or held back because of what happened elsewhere."""

    @property
    def is_searching(self) -> bool:
        return bool(self._tried or self._held)

    def suspects(self, request: Request) -> bool:
        """It is held back or on trial."""
        return request in self._tried or self.holds_back(request)

    def holds_back(self, request: Request) -> bool:
        return any(request in group for group in self._held)

    @property
    def under_last_death(self) -> Mapping[Request, int]:
        """Who was in flight then, and how many tokens each had."""
        return self._under_last_death

    def met(self, request: Request) -> bool:
        """A worker of another replica has died under it, which was handed over: it is tried alone, since there may be
        no second death here to learn from. Whether that begins now; until then it is held back."""
        self._adopted.add(request)
        self._held.insert(0, [request])
        return bool(self._next_trial())

    def died(self, in_flight: Iterable[Request]) -> tuple[bool, Request | None]:
        """A worker has died under these. (Whether that taught anything, the guilty one if it is found.)"""
        under = {request: num_given(request) for request in in_flight}
        struck = [request for request, count in under.items() if count <= self._under_last_death.get(request, -1)]
        self._under_last_death = under
        if not self.is_searching:
            self._try_half(struck)
            return bool(struck), None
        lone = next(iter(self._tried), None)
        if lone is not None and lone in self._adopted and struck != [lone]:
            return self._died_beside(lone, struck), None
        suspects = [request for request in under if request in self._tried]
        if not suspects:
            return False, None
        if len(self._tried) == 1:
            self.forget(suspects[0])
            return True, suspects[0]
        self._tried = {}
        self._try_half(suspects)
        return True, None

    def progressed(self) -> list[Request]:
        """Tokens were delivered. Returns those who are to be put in line, because their trial begins now."""
        for request, count in list(self._tried.items()):
            if num_given(request) > count:
                del self._tried[request]
                self._adopted.discard(request)
        return self._next_trial()

    def forget(self, request: Request) -> list[Request]:
        """It has ended. Returns those who are to be put in line now."""
        self._under_last_death.pop(request, None)
        if not self.is_searching:
            return []
        self._tried.pop(request, None)
        self._adopted.discard(request)
        groups = ([each for each in group if each is not request] for group in self._held)
        self._held = [group for group in groups if group]
        return self._next_trial()

    def _died_beside(self, adopted: Request, struck: list[Request]) -> bool:
        """A worker died while one was on trial that no death here speaks against more than against these."""
        if not struck:
            return False
        if adopted in struck:
            self._adopted.discard(adopted)
        else:
            self._held.insert(0, [adopted])
        self._try_half(struck)
        return True

    def _next_trial(self) -> list[Request]:
        if self._tried or not self._held:
            return []
        return self._try_half(self._held.pop())

    def _try_half(self, group: list[Request]) -> list[Request]:
        half = (len(group) + 1) // 2
        if group[half:]:
            self._held.append(group[half:])
        self._tried = {request: num_given(request) for request in group[:half]}
        return group[:half]


def num_given(request: Request) -> int:
    """What its client has been given."""
    return len(request.owner.token_ids) if request.owner is not None else 0
