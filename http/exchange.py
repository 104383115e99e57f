"""`ApiRequest` in, `ApiResponse` out: the seam between the API and whatever web framework carries it.

Nothing here knows a framework. A face (aiohttp in `server.py`) builds an `ApiRequest`, awaits `Api.handle`,
sends what comes back (plain bytes, or a `FrameStream` whose frames are pushed while the engine produces them), and
calls `Api.ended` when that is done or has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipring.http.json_bytes import json_bytes

if TYPE_CHECKING:
    from slipring.http.reply import Work
    from slipring.http.stream import FrameStream

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(slots=True)
class ApiRequest:
    """One HTTP request. The body is read only after route, key and content type were found good."""

    method: str
    path: str
    """As sent: percent-encoded, without the query. Routes match these very bytes, so no spelling slips by."""
    headers: Mapping[str, str]
    """Looked up with lower-case names; of repeated headers the first counts."""
    query: str = ""
    body: bytes = b""
    reader: Callable[[], Awaitable[bytes]] | None = None
    """Fetches the body when it is wanted; raises ApiError (413, 400). None: `body` is already there."""
    # From here on set by `Api.handle`.
    request_id: str = ""
    began: float = 0.0
    """Monotonic seconds."""
    began_ns: int = 0
    """Since 1970."""
    deadline: asyncio.TimerHandle | None = None
    """Ends a stream that takes too long."""

    async def read(self) -> bytes:
        if self.reader is not None:
            self.body, self.reader = await self.reader(), None
        return self.body


@dataclass(slots=True)
class ApiResponse:
    status: int
    body: bytes | FrameStream
    headers: dict[str, str] = field(default_factory=dict)
    work: Work | None = None
    """What the engine does for it."""
    expected: bool = False
    """A 5xx that is no failure: a probe comes while the server starts."""

    @classmethod
    def json(cls, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> ApiResponse:
        return cls(status, json_bytes(value), {"Content-Type": JSON, **(headers or {})})

    @classmethod
    def events(cls, stream: FrameStream) -> ApiResponse:
        """Server-sent events; proxies are told not to hold them back."""
        headers = {"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return cls(200, stream, headers)
