"""Which replica a request must go to, or would like to: what its headers say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slipring.http.errors import bad_request
from slipring.http.exchange import ApiRequest


@dataclass(frozen=True, slots=True)
class Placement:
    rank: int | None = None
    """The one and only."""
    session: str | None = None
    """Requests of one session would like the same replica."""


def placement(request: ApiRequest) -> Placement:
    """`X-data-parallel-rank` pins; `x-session-affinity` and `X-Session-Id` are hints. Raises ApiError (400)."""
    headers = request.headers
    session = headers.get("x-session-affinity") or headers.get("x-session-id") or None
    rank = headers.get("x-data-parallel-rank")
    if rank is None:
        return Placement(None, session)
    if not re.fullmatch(r"-?[0-9]{1,9}", rank.strip()):
        raise bad_request(f"X-data-parallel-rank must be a rank, got {rank[:40]!r}.", "X-data-parallel-rank")
    return Placement(int(rank), session)
