"""FrameStream: direct writing, merging while a client does not read, ends and failures."""

from __future__ import annotations

import asyncio

import pytest

from slipring.http.errors import ApiError, engine_failed
from slipring.http.stream import FrameStream
from slipring.runtime.request import Delta, TokenLogprob


class Plain:
    """Renders what came, so that a test can read it."""

    def delta(self, delta: Delta) -> bytes:
        return f"[{delta.index}:{delta.text}:{len(delta.token_ids)}:{delta.finish_reason or ''}]".encode()

    def tail(self) -> bytes:
        return b"<tail>"

    def error(self, error: ApiError) -> bytes:
        return f"<error {error.message}>".encode()


class Writer:
    def __init__(self, room: bool = True) -> None:
        self.frames: list[bytes] = []
        self.room = room

    def __call__(self, frames: bytes) -> bool:
        self.frames.append(frames)
        return self.room


def piece(text: str, index: int = 0, finish: str | None = None, error: str | None = None) -> Delta:
    return Delta(index=index, text=text, token_ids=(1,), finish_reason=finish, error=error)


def make(num_choices: int = 1) -> tuple[FrameStream, list[str]]:
    cancelled: list[str] = []
    return FrameStream(Plain(), num_choices, lambda: cancelled.append("cancelled")), cancelled


def test_direct_frames_are_written_within_push() -> None:
    stream, cancelled = make()
    writer = Writer()
    stream.attach(writer)
    stream.push(piece("a"))
    assert writer.frames == [b"[0:a:1:]"]
    stream.push(piece("b", finish="stop"))
    assert writer.frames[1:] == [b"[0:b:1:stop]<tail>"]
    assert stream.ended and not stream.failed and cancelled == []


def test_what_came_before_the_writer_is_written_at_attach() -> None:
    stream, _ = make(2)
    stream.push(piece("a"))
    stream.push(piece("x", 1))
    stream.push(piece("b"))
    writer = Writer()
    stream.attach(writer)
    assert writer.frames == [b"[0:ab:2:][1:x:1:]"]


def test_the_tail_waits_for_every_choice() -> None:
    stream, _ = make(2)
    writer = Writer()
    stream.attach(writer)
    stream.push(piece("a", 1, "length"))
    assert not stream.ended
    stream.push(piece("b", 0, "stop"))
    assert writer.frames[-1].endswith(b"<tail>") and stream.ended


def test_a_congested_stream_merges_until_it_is_resumed() -> None:
    stream, _ = make()
    writer = Writer(room=False)
    stream.attach(writer)
    stream.push(piece("a"))
    for text in "bcd":
        stream.push(piece(text))
    assert writer.frames == [b"[0:a:1:]"]
    writer.room = True
    stream.resume()
    assert writer.frames[1:] == [b"[0:bcd:3:]"]
    stream.push(piece("e"))
    assert writer.frames[2:] == [b"[0:e:1:]"]


def test_merging_keeps_logprobs_and_the_end() -> None:
    stream, _ = make()
    seen: list[Delta] = []
    renderer = Plain()
    renderer.delta = lambda delta: seen.append(delta) or b"x"  # type: ignore[method-assign]
    stream = FrameStream(renderer, 1, lambda: None)
    entry = TokenLogprob(1, -0.5, 1, ())
    for finish in (None, None, "stop"):
        stream.push(Delta(index=0, text="t", token_ids=(7,), logprobs=(entry,), finish_reason=finish))
    stream.attach(Writer())
    (merged,) = seen
    assert (merged.text, list(merged.token_ids), merged.finish_reason) == ("ttt", [7, 7, 7], "stop")
    assert merged.logprobs == [entry] * 3


def test_an_error_ends_the_stream_without_its_tail() -> None:
    stream, cancelled = make(2)
    writer = Writer()
    stream.attach(writer)
    stream.push(piece("a"))
    stream.push(piece("", 1, "error", "worker died"))
    stream.push(piece("late"))
    assert writer.frames == [b"[0:a:1:]", b"<error worker died>"]
    assert stream.ended and stream.failed and cancelled == ["cancelled"]


def test_an_error_while_congested_follows_what_was_held() -> None:
    stream, _ = make()
    writer = Writer(room=False)
    stream.attach(writer)
    stream.push(piece("a"))
    stream.push(piece("b"))
    stream.fail(engine_failed("gone"))
    writer.room = True
    stream.resume()
    assert writer.frames[1:] == [b"[0:b:1:]<error gone>"] and stream.failed


def test_cancel_is_once_and_silences_the_stream() -> None:
    stream, cancelled = make()
    writer = Writer()
    stream.attach(writer)
    stream.cancel()
    stream.cancel()
    stream.push(piece("a", finish="stop"))
    assert writer.frames == [] and cancelled == ["cancelled"]


def test_cancelling_an_ended_stream_aborts_nothing() -> None:
    stream, cancelled = make()
    stream.attach(Writer())
    stream.push(piece("a", finish="stop"))
    stream.cancel()
    assert cancelled == []


def test_wait_returns_when_congested_and_when_ended() -> None:
    async def main() -> None:
        stream, _ = make()
        writer = Writer()
        stream.attach(writer)
        waiting = asyncio.ensure_future(stream.wait())
        await asyncio.sleep(0)
        stream.push(piece("a"))
        await asyncio.sleep(0)
        assert not waiting.done(), "no wake-up per token"
        writer.room = False
        stream.push(piece("b"))
        await asyncio.wait_for(waiting, 1)
        assert not stream.ended
        writer.room = True
        stream.resume()
        waiting = asyncio.ensure_future(stream.wait())
        await asyncio.sleep(0)
        stream.push(piece("c", finish="stop"))
        await asyncio.wait_for(waiting, 1)
        assert stream.ended

    asyncio.run(main())


@pytest.mark.parametrize("failure", [False, True])
def test_iterating_gives_the_same_frames(failure: bool) -> None:
    async def main() -> bytes:
        stream, _ = make()

        async def produce() -> None:
            for text in "abc":
                stream.push(piece(text))
                await asyncio.sleep(0)
            if failure:
                stream.fail(engine_failed("x"))
            else:
                stream.push(piece("d", finish="stop"))

        producing = asyncio.ensure_future(produce())
        frames = b"".join([frames async for frames in stream])
        await producing
        return frames

    frames = asyncio.run(main())
    assert frames.endswith(b"<error x>" if failure else b"<tail>")
    assert "".join(part.split(":")[1] for part in frames.decode().split("[")[1:]) == ("abc" if failure else "abcd")


class Broken(Plain):
    def delta(self, delta: Delta) -> bytes:
        if delta.text == "bad":
            raise ValueError("cannot be said")
        return super().delta(delta)


@pytest.mark.parametrize("congested", [False, True])
def test_a_renderer_that_raises_on_what_was_held_ends_the_stream_with_an_error(
    congested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled: list[str] = []
    stream = FrameStream(Broken(), 2, lambda: cancelled.append("cancelled"))
    writer = Writer(room=False)
    if congested:
        stream.push(piece("x"))
        stream.attach(writer)
    stream.push(piece("good", 1))
    stream.push(piece("bad"))
    stream.resume() if congested else stream.attach(writer)
    assert writer.frames[-1] == b"[1:good:1:]<error The answer could not be written.>"
    assert stream.ended and stream.failed and cancelled == ["cancelled"]
    assert "a frame could not be made" in caplog.text
    stream.push(piece("more", 1))
    stream.cancel()
    assert len(writer.frames) == 1 + congested and cancelled == ["cancelled"]


class Mute(Broken):
    def error(self, error: ApiError) -> bytes:
        raise ValueError("cannot be said either")


def test_a_renderer_that_cannot_even_say_the_error_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[bytes]:
        iterated = FrameStream(Mute(), 1, lambda: None)
        iterated.push(piece("bad"))
        return [frames async for frames in iterated]

    assert asyncio.run(scenario()) == []
    stream, writer = FrameStream(Mute(), 1, lambda: None), Writer()
    stream.attach(writer)
    stream.push(piece("good"))
    stream.push(piece("bad"))
    assert stream.ended and stream.failed and len(writer.frames) == 1
    assert "the error frame could not be made" in caplog.text


def test_a_renderer_that_raises_ends_an_iterated_stream_with_an_error() -> None:
    async def scenario() -> list[bytes]:
        stream = FrameStream(Broken(), 1, lambda: None)
        stream.push(piece("bad"))
        return [frames async for frames in stream]

    assert asyncio.run(scenario()) == [b"<error The answer could not be written.>"]
