"""What a format of tool calls (`tool_formats.py`) is to the parser, and what its reader is given to work with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from slipring.http.json_text import Malformed, read_value
from slipring.http.output_events import EventWriter
from slipring.http.text_source import Markers, Reader, TextSource

Schemas = Mapping[str, Any]
"""The tools' names, each with the JSON schema of its parameters."""


class NotACall(Exception):
    """What looked like a call is content."""


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def special(self) -> bool:
        """Its markers are special tokens, which are left out of text unless asked for."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin calls wherever they stand in the content."""
        ...

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Texts that begin calls at the very beginning of the content; they are not consumed."""
        ...

    def read(self, calls: CallReader, marker: str) -> Reader[None]:
        """Read what follows `marker` (empty: a beginning), to the end of the calls. Raises NotACall."""
        ...


class CallReader:
    """What a format's reader works with: the source, and where calls go."""

    def __init__(self, source: TextSource, out: EventWriter, schemas: Schemas, limit: int, whole: bool) -> None:
        """`whole`: a call is passed on when it is complete; one that the text ends in is content."""
        self.source = source
        self.schemas = schemas
        self._out = out
        self._limit = limit
        self._held: list[str] | None = [] if whole else None
        """Of the call that has begun, what is not passed on yet: its name and pieces of its arguments."""
        self.num_calls = 0
        self.num_ended = 0

    def start(self, name: str) -> None:
        """A call for certain: nothing consumed so far is given back any more, unless whole calls are wanted."""
        if self._held is not None:
            self._held = [name]
        else:
            self._begin(name)

    def write(self, fragment: str) -> None:
        """A piece of the arguments."""
        if self._held is not None:
            self._held.append(fragment)
        else:
            self._out.arguments(fragment)

    def end(self, complete: bool = True) -> None:
        """What follows may again turn out to be content. Raises NotACall."""
        if self._held is not None:
            if self.source.closed and not complete:
                raise NotACall
            name, *pieces = self._held
            self._begin(name)
            self._out.arguments("".join(pieces))
        self._out.end_call(complete)
        self.num_ended += 1
        self.source.mark()

    def _begin(self, name: str) -> None:
        self.source.unmark()
        self.num_calls += 1
        self._out.begin_call(name, dropped=self.num_calls > self._limit)

    def read_arguments(self, name: str, ends: Markers) -> Reader[None]:
        """A whole call but its frame: from the brace that opens its arguments to the one that closes them. When the
        JSON breaks, everything up to one of `ends` goes on as it was written."""
        self.start(name)
        try:
            yield from read_value(self.source, self.write)
        except Malformed:
            yield from self._read_raw(ends)
            self.end(complete=False)
        else:
            self.end()

    def _read_raw(self, ends: Markers) -> Reader[None]:
        """Leaves the marker for the format to consume."""
        while True:
            text, found = ends.next(self.source)
            self.write(text)
            if found is not None:
                self.source.position -= len(found)
                return
            if self.source.closed:
                return
            yield
