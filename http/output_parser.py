"""What a model writes, taken apart while it comes: reasoning, content, tool calls.

The one parser behind every API that shows them, streamed or not: text goes in as it comes, events come out. Pure and
synchronous. The formats of models are described in `tool_formats.py` and `reasoning.py`.

    text: [reasoning] content [calls [content]] ...

Invariants:
  events, joined, do not depend on how the text was cut into pieces
  nothing is lost and nothing comes twice: what turns out not to be a call is content, character by character; only
    markers, the layout of a call and white space beside a call or beside reasoning are dropped
  text waits only as long as it may still become something else
  a call is announced once its name is known and its arguments begin; its arguments are then passed on as they come,
    as valid JSON in one normal form (`json_text.py`). A call that the text leaves unfinished, or whose JSON breaks,
    keeps what was written, raw, and ends with `complete` false
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from slipring.http.json_text import Malformed, read_value
from slipring.http.text_source import Markers, Reader, TextSource


@dataclass(slots=True)
class ReasoningDelta:
    text: str


@dataclass(slots=True)
class ContentDelta:
    text: str


@dataclass(slots=True)
class ToolCallStart:
    """Calls are numbered from 0 in each choice."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ToolArgumentsDelta:
    """A piece of the arguments' JSON text."""

    index: int
    fragment: str


@dataclass(slots=True)
class ToolCallEnd:
    index: int
    complete: bool
    """False: the arguments are not a JSON object, because the text ended or broke inside them."""


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd


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


class ReasoningFormat(Protocol):
    """How a family of models shows its reasoning, at the beginning of its answer."""

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...


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


class EventWriter:
    """Collects events, joining neighbours of one kind, and decides about white space at borders."""

    def __init__(self, new_id: Callable[[], str], *, trims: bool) -> None:
        """`trims`: white space beside calls is layout."""
        self._new_id = new_id
        self._trims = trims
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._make: Callable[[str], Event] | None = None
        self._space: list[str] = []
        """White space that is layout if a call, or the end of reasoning, follows."""
        self._fresh = False
        """White space that comes now is layout."""
        self._num_calls = 0
        self._dropping = False

    def take(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        self._trimmed(ReasoningDelta, text)

    def content(self, text: str) -> None:
        if self._trims or self._fresh:
            self._trimmed(ContentDelta, text, holds=self._trims)
        elif text:
            self._add(ContentDelta, text)

    def border(self) -> None:
        """Between reasoning and content, or content and call: white space on both sides goes."""
        self._space.clear()
        self._fresh = True

    def release(self, make: Callable[[str], Event]) -> None:
        """The text has ended: what was held is text."""
        if self._space:
            self._add(make, "".join(self._space))
            self._space.clear()

    def begin_call(self, name: str, dropped: bool) -> None:
        self.border()
        self._dropping = dropped
        if not dropped:
            self._flush()
            self._events.append(ToolCallStart(self._num_calls, self._new_id(), name))

    def arguments(self, fragment: str) -> None:
        if fragment and not self._dropping:
            self._add(self._fragment, fragment)

    def end_call(self, complete: bool) -> None:
        if not self._dropping:
            self._flush()
            self._events.append(ToolCallEnd(self._num_calls, complete))
            self._num_calls += 1
        self._dropping = False

    def _fragment(self, text: str) -> ToolArgumentsDelta:
        return ToolArgumentsDelta(self._num_calls, text)

    def _trimmed(self, make: Callable[[str], Event], text: str, holds: bool = True) -> None:
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
        body = text.rstrip() if holds else text
        if body:
            self.release(make)
            self._add(make, body)
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _add(self, make: Callable[[str], Event], text: str) -> None:
        if make != self._make:
            self._flush()
            self._make = make
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._pieces and self._make is not None:
            self._events.append(self._make("".join(self._pieces)))
        self._pieces.clear()
        self._make = None


class OutputParser:
    """One choice's text. `feed` it as it comes, then `finish` it once."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        new_id: Callable[[], str],
        schemas: Schemas = MappingProxyType({}),
        limit: int = 1 << 30,
        in_reasoning: bool = False,
    ) -> None:
        """`tools` None: calls are content. `schemas`: the tools there are. `limit`: calls beyond so many are dropped.
        `in_reasoning`: the prompt has already opened the reasoning."""
        self._source = TextSource()
        self._out = EventWriter(new_id, trims=tools is not None)
        self._calls = CallReader(self._source, self._out, schemas, limit)
        self._tools = tools
        self._reasoning = reasoning
        self.in_reasoning = in_reasoning and reasoning is not None
        """What came last belongs to the reasoning."""
        self.reasoned = self.in_reasoning
        """There is, or was, reasoning."""
        self.undecided = True
        """What comes next may be reasoning."""
        self._reader = self._read()
        self._ended = False
        self._advance()

    @property
    def num_calls(self) -> int:
        """Calls that have begun, dropped ones included."""
        return self._calls.num_calls

    @property
    def num_finished_calls(self) -> int:
        return self._calls.num_calls - self._calls.open

    def feed(self, text: str) -> list[Event]:
        if text:
            self._source.push(text)
            self._advance()
        return self._out.take()

    def finish(self) -> list[Event]:
        """No more text will come: what was held back is decided."""
        self._source.closed = True
        self._advance()
        return self._out.take()

    def _advance(self) -> None:
        if not self._ended:
            self._ended = next(self._reader, True) is True

    def _read(self) -> Reader[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        self.undecided = self.in_reasoning
        if self._tools is None:
            yield from self._read_plain()
        else:
            yield from self._read_beginning(self._tools)
            yield from self._read_content(self._tools)
            self._out.release(ContentDelta)

    def _read_reasoning(self, form: ReasoningFormat) -> Reader[None]:
        source, out = self._source, self._out
        source.mark()
        yield from source.next_token()
        begins = yield from source.literal(form.begin)  # some write it although the prompt has opened it already
        if not (begins or self.in_reasoning):
            return out.content(source.take_back())
        source.unmark()
        self.in_reasoning = self.reasoned = True
        ends = Markers((form.end,))
        out.border()
        while True:
            text, found = ends.next(source)
            out.reasoning(text)
            if found is not None:
                break
            if source.closed:
                return out.release(ReasoningDelta)
            yield
        out.border()
        self.in_reasoning = False

    def _read_plain(self) -> Reader[None]:
        source = self._source
        while True:
            self._out.content(source.window[source.position :])
            source.position = len(source.window)
            if not (yield from source.more()):
                return

    def _read_beginning(self, form: ToolFormat) -> Reader[None]:
        """Calls that nothing announces stand at the very beginning."""
        if not form.beginnings:
            return
        self._source.mark()
        yield from self._source.next_token()
        size = max(map(len, form.beginnings))
        if (yield from self._source.ahead(size)).startswith(form.beginnings):
            yield from self._attempt(form, "")
        else:
            self._out.content(self._source.take_back())

    def _read_content(self, form: ToolFormat) -> Reader[None]:
        source, markers = self._source, Markers(form.markers)
        while True:
            text, marker = markers.next(source)
            if text:
                self._out.content(text)
            if marker is not None:
                source.position -= len(marker)
                source.mark()
                source.position += len(marker)
                yield from self._attempt(form, marker)
            elif source.closed:
                return
            else:
                yield

    def _attempt(self, form: ToolFormat, marker: str) -> Reader[None]:
        """A mark is set where it begins. What is no call goes to the content, and reading goes on behind it."""
        try:
            yield from form.read(self._calls, marker)
            self._source.unmark()
        except (NotACall, Malformed):
            self._out.content(self._source.take_back())


@dataclass(slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class ParsedText:
    """Events, joined: what an answer that is not streamed shows."""

    reasoning: str | None = None
    """None: there was none."""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def join_events(events: Iterable[Event]) -> ParsedText:
    reasoning: list[str] = []
    content: list[str] = []
    fragments: list[list[str]] = []
    parsed = ParsedText()
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallStart(_, call_id, name):
                parsed.calls.append(ParsedCall(call_id, name))
                fragments.append([])
            case ToolArgumentsDelta(index, fragment):
                fragments[index].append(fragment)
            case ToolCallEnd(index, complete):
                parsed.calls[index].complete = complete
    parsed.reasoning = "".join(reasoning) if reasoning else None
    parsed.content = "".join(content)
    for call, pieces in zip(parsed.calls, fragments, strict=True):
        call.arguments = "".join(pieces)
    return parsed
