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

    def __init__(self, source: TextSource, out: EventWriter, schemas: Schemas, limit: int) -> None:
        self.source = source
        self.schemas = schemas
        self._out = out
        self._limit = limit
        self.num_calls = 0
        self.open = False
        """A call has begun and not ended."""

    def start(self, name: str) -> None:
        """A call for certain: nothing consumed so far is given back any more."""
        self.source.unmark()
        self.open = True
        self.num_calls += 1
        self._out.begin_call(name, dropped=self.num_calls > self._limit)

    def write(self, fragment: str) -> None:
        """A piece of the arguments."""
        self._out.arguments(fragment)

    def end(self, complete: bool = True) -> None:
        """What follows may again turn out to be content."""
        self._out.end_call(complete)
        self.open = False
        self.source.mark()

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
