"""Readers of tool calls whose arguments are a JSON object: in JSON envelopes, or framed by markers.

Models forget or double closing brackets; a call counts as soon as its arguments are whole, whatever is wrong behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson

from slipring.http.json_text import expect, normal_object, read_string, read_value
from slipring.http.text_source import Markers, Reader, TextSource
from slipring.http.tool_calls import CallReader, NotACall

_NAME = re.compile(r"[\w.:/-]*")
_WORD = re.compile(r"[a-zA-Z0-9]*")
_BRACES = re.compile(r"[\s}]*")
_ARGUMENTS = ("arguments", "parameters", "args")
_ENVELOPE = frozenset({"id", "type", "function", "name", "call_id", *_ARGUMENTS})
"""Keys of a call. An object with another one, where nothing announced a call, is just JSON."""


def read_name(source: TextSource) -> Reader[str]:
    name = yield from source.span(_NAME)
    if not name:
        raise NotACall
    return name


class _Envelope:
    """Reads `{"name": ..., "arguments": {...}}`, its keys in any order and among others."""

    def __init__(self, calls: CallReader, ends: Markers, announced: bool) -> None:
        self._calls = calls
        self._ends = ends
        self._announced = announced
        self._name: str | None = None
        self._arguments: str | None = None
        """Read before the name was known, or not written as an object."""

    def read(self) -> Reader[None]:
        source = self._calls.source
        yield from expect(source, "{")
        while not (yield from self._read_pair()):
            if (yield from source.next_token()) != ",":
                break
            source.position += 1
        else:
            return (yield from _read_tail(source))
        if self._name is None or source.here() != "}":
            raise NotACall
        self._send("{}")
        yield from _read_tail(source)

    def _read_pair(self) -> Reader[bool]:
        """True: the call is through."""
        source = self._calls.source
        key = yield from _read_text(source)
        yield from expect(source, ":")
        character = yield from source.next_token()
        if not self._announced and key not in _ENVELOPE:
            raise NotACall
        if key == "function" and character == "{":  # OpenAI's own envelope: go on inside it
            source.position += 1
            return (yield from self._read_pair())
        if key in ("name", "function") and self._name is None:
            yield from self._read_name()
        elif key in _ARGUMENTS and self._arguments is None:
            if character == "{" and self._name is not None:
                yield from self._calls.read_arguments(self._name, self._ends)
                return True
            self._arguments = yield from self._read_ahead()
        else:
            yield from read_value(source, _nowhere)
        if self._name is None or self._arguments is None:
            return False
        self._send(self._arguments)
        return True

    def _read_name(self) -> Reader[None]:
        source = self._calls.source
        yield from expect(source, '"')
        name = yield from read_name(source)
        if source.here() != '"' or not (self._announced or name in self._calls.schemas):
            raise NotACall
        source.position += 1
        self._name = name

    def _read_ahead(self) -> Reader[str]:
        """Arguments that cannot be passed on while they come: an object, null, or a string that holds one."""
        pieces: list[str] = []
        yield from read_value(self._calls.source, pieces.append)
        text = "".join(pieces)
        if text in ("null", '""'):
            return "{}"
        found = normal_object(orjson.loads(text) if text[0] == '"' else text)
        if found is None:
            raise NotACall
        return found

    def _send(self, arguments: str) -> None:
        assert self._name is not None
        self._calls.start(self._name)
        self._calls.write(arguments)
        self._calls.end()


def _read_text(source: TextSource) -> Reader[str]:
    if (yield from source.next_token()) != '"':
        raise NotACall
    pieces: list[str] = []
    yield from read_string(source, pieces.append)
    return orjson.loads("".join(pieces))


def _read_tail(source: TextSource) -> Reader[None]:
    """What an envelope may hold behind its arguments, and its closing braces, which are given back no more."""
    while (yield from source.next_token()) == ",":
        source.position += 1
        character = yield from source.next_token()
        if character == "{":  # another envelope: this one was never closed
            return
        yield from _read_text(source)
        yield from expect(source, ":")
        yield from read_value(source, _nowhere)
    yield from source.span(_BRACES)
    source.mark()


def _nowhere(_: str) -> None:
    return None


@dataclass(frozen=True)
class JsonCalls:
    """One envelope, several with `;`, `,` or nothing between them, or an array of them; then perhaps a closer."""

    name: str
    markers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ()
    special: bool = False

    def read(self, calls: CallReader, marker: str) -> Reader[None]:
        source, closers = calls.source, self.closers
        if not marker and (yield from source.literal("```")):
            yield from source.span(_WORD)
            closers = ("```",)
        ends = Markers(closers)
        in_array = (yield from source.next_token()) == "["
        source.position += in_array
        yield from _Envelope(calls, ends, bool(marker)).read()
        while (yield from _another(source)):
            yield from _Envelope(calls, ends, bool(marker)).read()
        if in_array and source.here() == "]":
            source.position += 1
        yield from source.closer(closers)


def _another(source: TextSource) -> Reader[bool]:
    """Whether an envelope follows; a separator before it is consumed."""
    character = yield from source.next_token()
    if character and character in ";,":
        source.position += 1
        if (yield from source.next_token()) != "{":
            raise NotACall
        return True
    return character == "{"


@dataclass(frozen=True)
class MistralCalls:
    """[TOOL_CALLS] and an array of envelopes, or a name and its arguments."""

    name: str = "mistral"
    markers: tuple[str, ...] = ("[TOOL_CALLS]",)
    beginnings: tuple[str, ...] = ()
    special: bool = True
    closers: tuple[str, ...] = ()

    def read(self, calls: CallReader, marker: str) -> Reader[None]:
        source = calls.source
        if (yield from source.next_token()) in ("[", "{"):
            yield from JsonCalls(self.name).read(calls, marker)
            return
        name = yield from read_name(source)
        if (yield from source.literal("[CALL_ID]")):
            yield from read_name(source)
        yield from source.literal("[ARGS]")
        if (yield from source.next_token()) != "{":
            raise NotACall
        yield from calls.read_arguments(name, Markers(self.markers))


@dataclass(frozen=True)
class FramedCalls:
    """Each call between markers: a name, a separator, arguments; all of them perhaps between markers of their own."""

    name: str
    section: tuple[str, str]
    call: tuple[str, str]
    separator: str
    special: bool = False
    beginnings: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.section[0], self.call[0]

    def read(self, calls: CallReader, marker: str) -> Reader[None]:
        source = calls.source
        if marker == self.section[0]:
            yield from source.next_token()
            if not (yield from source.literal(self.call[0])):
                raise NotACall
        more = True
        while more:
            yield from self._read_call(calls)
            yield from source.next_token()
            more = yield from source.literal(self.call[0])
        yield from source.closer((self.section[1],))

    def _read_call(self, calls: CallReader) -> Reader[None]:
        source = calls.source
        yield from source.next_token()
        name = yield from read_name(source)
        if not (yield from source.literal(self.separator)):
            raise NotACall
        if (yield from source.next_token()) != "{":  # DeepSeek V3: function<sep>NAME, and a fenced block
            name = yield from read_name(source)
            yield from source.closer(("```json",))
        if (yield from source.next_token()) != "{":
            raise NotACall
        # Kimi writes functions.NAME:NUMBER.
        name = re.sub(r"^functions\.|:\d+$", "", name)
        yield from calls.read_arguments(name, Markers((self.call[1], self.section[1])))
        yield from source.closer(("```",))
        yield from source.closer((self.call[1],))
