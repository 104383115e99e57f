"""`FrameStream`: the frames of one streamed answer, pushed by the engine's sink, taken by the client's connection.

A delta's way:  push(delta) → renderer → frames → the face's writer, all in one synchronous call. No task wakes up
per token. When the writer says that the client does not read (congested), deltas are merged choice by choice
instead: text joined, ids and logprobs kept, no frames. The face then waits until there is room and calls `resume`,
which writes what was merged as one frame per choice and goes back to the direct way.

A face without a synchronous writer (ASGI) iterates instead; that is the same stream in its merging state.

Invariants: every delta is rendered once, in order within its choice; the tail comes once, after the last choice's
end; a failed stream ends with its error frame and never with the tail; after the end nothing is rendered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol, cast

from slipring.http.errors import ApiError, answer_failed, engine_failed
from slipring.runtime.request import Delta, TokenLogprob

logger = logging.getLogger(__name__)


class Renderer(Protocol):
    """Turns deltas into an API's own frames. `b""` means: nothing to send yet."""

    def delta(self, delta: Delta) -> bytes: ...

    def tail(self) -> bytes:
        """What follows the end of the last choice."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The frame that ends the stream because something broke."""
        ...


class FrameStream:
    def __init__(self, renderer: Renderer, num_choices: int, on_cancel: Callable[[], object]) -> None:
        self._renderer = renderer
        self._num_open = num_choices
        self._on_cancel = on_cancel
        self._write: Callable[[bytes], bool] | None = None
        self._merging = True
        self._held: dict[int, Delta] = {}
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        """Every frame has been handed over."""
        self.failed = False
        """Ended by an error frame: the face closes the connection."""
        self.cancelled = False
        """The client left before the end."""
        self.on_end: Callable[[], object] | None = None

    # The engine's side.

    def push(self, delta: Delta) -> None:
        """The engine's sink."""
        if self.ended or self._error is not None:
            return
        if delta.finish_reason == "error":
            self.fail(answer_failed(delta.error, delta.error_param))
        elif self._merging:
            self._hold(delta)
        else:
            try:
                self._send(self._render(delta))
            except Exception:
                self._break()
                self._send(self._take())

    def fail(self, error: ApiError) -> None:
        """End the stream with an error frame (after what is still held); the engine's work for it is cancelled."""
        if self.ended or self._error is not None:
            return
        self._error = error
        self._on_cancel()
        if self._merging:
            self._wake()
        else:
            self._send(self._take())

    # The face's side.

    def attach(self, write: Callable[[bytes], bool]) -> None:
        """Hand frames to `write` as they come. It returns False when it wants no more until `resume`."""
        self._write = write
        self.resume()

    def resume(self) -> None:
        """There is room again: write what was merged, then go on directly (unless that filled the room at once)."""
        self._merging = False
        self._send(self._take())

    async def wait(self) -> None:
        """Until the stream has ended, or is congested, or (without a writer) has something to take."""
        while not self._wants_face():
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def cancel(self) -> None:
        """The client has gone."""
        if not self.ended:
            self.cancelled = True
            self._finish()
            self._on_cancel()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self.ended:
            await self.wait()
            if frames := self._take():
                yield frames

    # Inside.

    def _wants_face(self) -> bool:
        if self.ended:
            return True
        if self._write is None:
            return bool(self._held) or self._error is not None
        return self._merging

    def _send(self, frames: bytes) -> None:
        assert self._write is not None
        if frames and not self._write(frames) and not self.ended:
            self._merging = True
            self._wake()

    def _render(self, delta: Delta) -> bytes:
        frames = self._renderer.delta(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                frames += self._renderer.tail()
                self._finish()
        return frames

    def _take(self) -> bytes:
        frames = self._render_held()
        if self._error is not None and not self.ended:
            try:
                frames += self._renderer.error(self._error)
            except Exception:  # it may be the very thing that broke the stream: the connection's end has to do
                logger.exception("the error frame could not be made")
            self.failed = True
            self._finish()
        return frames

    def _render_held(self) -> bytes:
        """What was merged, or as much of it as could be said; the rest is an error then."""
        held, self._held = self._held, {}
        frames = b""
        try:
            for delta in held.values():
                frames += self._render(delta)
        except Exception:
            self._break()
        return frames

    def _break(self) -> None:
        """A frame could not be made: an error ends the stream."""
        logger.exception("a frame could not be made")
        if self._error is None and not self.ended:
            self._error = engine_failed("The answer could not be written.")
            self._on_cancel()

    def _hold(self, delta: Delta) -> None:
        held = self._held.get(delta.index)
        if held is None:
            self._held[delta.index] = _own_copy(delta)
        else:
            _merge(held, delta)
        self._wake()

    def _finish(self) -> None:
        self.ended = True
        self._held.clear()
        on_end, self.on_end = self.on_end, None  # it may hold us: no cycle is left for the collector
        if on_end is not None:
            on_end()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._wants_face():
            self._waiter.set_result(None)


def _own_copy(delta: Delta) -> Delta:
    return Delta(
        index=delta.index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        logprobs=None if delta.logprobs is None else list(delta.logprobs),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        num_cached_tokens=delta.num_cached_tokens,
        prompt_logprobs=delta.prompt_logprobs,
        timing=delta.timing,
    )


def _merge(held: Delta, delta: Delta) -> None:
    """`held` is a copy of our own (`_own_copy`), so its sequences are lists."""
    held.text += delta.text
    cast(list[int], held.token_ids).extend(delta.token_ids)
    if delta.logprobs is not None:
        held.logprobs = held.logprobs or []
        cast(list[TokenLogprob], held.logprobs).extend(delta.logprobs)
    held.finish_reason = delta.finish_reason
    held.stop_reason = delta.stop_reason
    held.timing = delta.timing
    held.num_cached_tokens = max(held.num_cached_tokens, delta.num_cached_tokens)
