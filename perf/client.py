"""A load client that costs little: raw HTTP/1.1 over uvloop, one connection a stream, timing each SSE event.

`python -m perf.client` reads a job (JSON) on stdin and prints a result (JSON), so that it can run pinned to a core
of its own. It checks every stream: status 200, the text that the instant worker must give, a finish reason, [DONE].
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import uvloop


@dataclass
class Job:
    port: int
    num_streams: int
    num_tokens: int
    prompt: list[int]
    text: str
    """What every stream must say."""
    ramp_s: float = 0.0
    """Arrivals are spread evenly over so long; 0: all at once."""
    timeout_s: float = 120.0
    steady: bool = False
    """Count only the gaps that begin after every stream has begun."""


@dataclass
class Outcome:
    seconds: float
    num_errors: int
    errors: list[str]
    ttft_s: list[float]
    gaps_s: list[float] = field(repr=False)
    """Times between tokens, of all streams."""


class Chunk(msgspec.Struct):
    choices: list[dict[str, Any]] = []


class Stream(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, request: bytes, job: Job, done: asyncio.Future[None]) -> None:
        self._request, self._job, self._done = request, job, done
        self.times: list[float] = []
        self._data = bytearray()
        self.began = time.perf_counter()
        self.error: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.began = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._data += data
        self.times += [now] * data.count(b"data: {")
        if data.endswith(b"0\r\n\r\n"):
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"connection lost: {exc}")

    def _finish(self, error: str | None) -> None:
        if self._done.done():
            return
        self.error = error
        self._done.set_result(None)
        self._transport.close()

    def check(self) -> None:
        """Judge the answer. Only once all are in: it takes milliseconds, in which no other stream would be read."""
        if self.error is None:
            self.error = self._fault()

    def _fault(self) -> str | None:
        head, _, body = bytes(self._data).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return head.split(b"\r\n")[0].decode()
        events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
        if events[-1].strip() != b"[DONE]":
            return "no [DONE]"
        chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
        text = "".join(chunk["text"] for chunk in chunks)
        if text != self._job.text or chunks[-1]["finish_reason"] != "length":
            return f"wrong answer: {text[:60]!r}"
        return None


async def run(job: Job) -> Outcome:
    loop = asyncio.get_running_loop()
    body = {"model": "instant", "prompt": job.prompt, "max_tokens": job.num_tokens, "stream": True, "ignore_eos": True}
    payload = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
    began = time.perf_counter()
    streams = await asyncio.gather(*[_one(loop, request, job, i, began) for i in range(job.num_streams)])
    seconds = time.perf_counter() - began
    for stream in streams:
        if not isinstance(stream, str):
            stream.check()
    errors = [stream if isinstance(stream, str) else stream.error for stream in streams]
    errors = [error for error in errors if error]
    good = [stream for stream in streams if not isinstance(stream, str) and stream.error is None]
    since = max((stream.times[0] for stream in good), default=0.0) if job.steady else 0.0
    return Outcome(
        seconds,
        len(errors),
        sorted(set(errors))[:5],
        [stream.times[0] - stream.began for stream in good],
        [b - a for stream in good for a, b in zip(stream.times, stream.times[1:], strict=False) if a >= since],
    )


async def _one(loop: asyncio.AbstractEventLoop, request: bytes, job: Job, index: int, began: float) -> Stream | str:
    at = began + job.ramp_s * index / job.num_streams
    if (pause := at - time.perf_counter()) > 0:
        await asyncio.sleep(pause)
    done = loop.create_future()
    try:
        _, stream = await loop.create_connection(lambda: Stream(request, job, done), "127.0.0.1", job.port)
        await asyncio.wait_for(done, job.timeout_s)
    except (OSError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return stream


if __name__ == "__main__":
    json.dump(asdict(uvloop.run(run(Job(**json.load(sys.stdin))))), sys.stdout)
