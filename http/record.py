"""`Record`: all that is told of one request once it has ended, for the access log and for traces.

Made from readings that were taken anyway; nothing in here is touched for each token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.stream import FrameStream

if TYPE_CHECKING:
    from slipring.http.reply import Work

CLIENT_LEFT = 499
"""In place of a status: the client went away before it had its answer (nginx's number)."""


@dataclass(frozen=True, slots=True)
class Record:
    request_id: str
    method: str
    path: str
    route: str
    """The pattern; `unmatched` for paths that are none of ours."""
    operation: str | None
    """`chat`, `text_completion`, ...: what the route makes the model do."""
    status: int
    failed: bool
    """A 5xx that was not to be expected, or a stream that ended with an error."""
    began_ns: int
    """Since 1970."""
    began: float
    """Monotonic seconds, as `ended` and the engine's readings are."""
    ended: float
    traceparent: str
    work: Work | None
    """What the engine did for it."""

    @property
    def duration_s(self) -> float:
        return self.ended - self.began

    @property
    def ttft_s(self) -> float | None:
        """From the request's head to the first token of any of its completions."""
        timings = self.work.usage.timings if self.work is not None else []
        first = min((timing.first_token for timing in timings if timing.first_token), default=None)
        return None if first is None else first - self.began


def record(request: ApiRequest, route: str, operation: str | None, response: ApiResponse | None) -> Record:
    """`response` None: the client left before there was one."""
    stream = response.body if response is not None and isinstance(response.body, FrameStream) else None
    left = response is None or (stream is not None and stream.cancelled)
    status = CLIENT_LEFT if response is None or left else response.status
    expected = response is not None and response.expected
    return Record(
        request_id=request.request_id,
        method=request.method,
        path=request.path,
        route=route,
        operation=operation,
        status=status,
        failed=(status >= 500 and not expected) or (stream is not None and stream.failed),
        began_ns=request.began_ns,
        began=request.began,
        ended=time.monotonic(),
        traceparent=request.headers.get("traceparent", ""),
        work=None if response is None else response.work,
    )
