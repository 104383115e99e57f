"""`RequestBook`: the requests of one replica from their arrival to their end, wherever they are meanwhile.

They are in the scheduler, wait for a worker, or are held back because they may be what ends the workers. Knows who goes
in line when, and who may go elsewhere; a request that it gives out after an epoch's end is ready for another scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipring.runtime.readmission import known_tokens, may_leave, num_scored, share_prefixes
from slipring.runtime.suspects import Suspects, num_given
from slipring.scheduler.request import Request, RequestStatus

DIED_TWICE = "workers of two replicas died while computing this request"
"""Why a request is given up that no replica has proved guilty."""


class RequestBook:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: dict[int, Request] = {}
        self._suspects = Suspects()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        return sum(len(request.token_ids) for request in self._requests.values())

    def add(self, request: Request) -> bool:
        """Whether it goes in line now: another replica may have died under it."""
        self._requests[id(request)] = request
        return not died_elsewhere(request) or self._suspects.met(request)

    def remove(self, request: Request) -> bool:
        """False: it is not here, or not any more."""
        return self._requests.pop(id(request), None) is not None

    def ended(self, request: Request) -> list[Request]:
        """Returns those that were held back for it, and go in line now."""
        return self._suspects.forget(request)

    def delivered(self, ended: list[Request]) -> list[Request]:
        """Tokens were, and these have ended with them. Returns those that were held back, and go in line now."""
        released: list[Request] = []
        for request in ended:
            self.remove(request)
            released += self._suspects.forget(request)
        return released + (self._suspects.progressed() if self._suspects.is_searching else [])

    def ready(self) -> list[Request]:
        """Those that go in line for a new epoch. Who is held back is made ready too: its trial may begin any time."""
        held = [request for request in self._requests.values() if self._suspects.holds_back(request)]
        for request in held:
            self._make_ready(request)
        return self._in_order(request for request in self._requests.values() if request not in held)

    def take_all(self, in_flight: list[Request]) -> tuple[list[Request], list[Request]]:
        """The replica gives them up; `in_flight`: under whom its worker has died, unless `died` was told.

        Returns those that may go elsewhere, and those that may not: workers of two replicas have died under them, and
        they have got no token since the first one did.
        """
        under = {**self._suspects.under_last_death, **{request: num_given(request) for request in in_flight}}
        requests, self._requests = self._in_order(self._requests.values()), {}
        self._suspects = Suspects()
        spent = [each for each in requests if each in under and died_elsewhere(each)]
        going = [request for request in requests if request not in spent]
        for request in going:
            if request in under and request.owner is not None:
                request.owner.moved_at = under[request]
        return going, spent

    def died(self, in_flight: list[Request]) -> tuple[bool, Request | None]:
        """The worker died under these. Whether that taught anything, and the guilty one, which is here no more."""
        learned, guilty = self._suspects.died(in_flight)
        if guilty is None or not self.remove(guilty):
            return learned, None
        guilty.status = RequestStatus.FINISHED
        return learned, guilty

    def leaving(self, in_flight: list[Request]) -> list[Request]:
        """Those that need not wait for the next epoch; most urgent first."""
        return self._in_order(
            request
            for request in self._requests.values()
            if not self._suspects.suspects(request) and may_leave(request, request in in_flight)
        )

    def left(self, requests: list[Request], in_flight: list[Request]) -> None:
        """These are another replica's now."""
        for request in requests:
            self.remove(request)
            self._suspects.forget(request)
            if request in in_flight:
                request.owner.moved_at = num_given(request)

    def _in_order(self, requests: Iterable[Request]) -> list[Request]:
        """In their old order, each with the tokens that its client has been given."""
        found = sorted(requests, key=lambda request: request.key)
        for request in found:
            self._make_ready(request)
        share_prefixes(found, self._block_size)
        return found

    def _make_ready(self, request: Request) -> None:
        request.restart(known_tokens(request), num_scored(request), self._block_size)


def died_elsewhere(request: Request) -> bool:
    """A worker of another replica died under it, and it has got no token since."""
    return request.owner is not None and num_given(request) <= request.owner.moved_at
