"""What a parsed answer consists of: events while it comes, `ParsedText` when they are joined; `EventWriter` makes them.

The one place that knows how neighbours are joined, how calls are numbered, and which white space is layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


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
