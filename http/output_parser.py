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
    keeps what was written, raw, and ends with `complete` false. With `whole_calls` a call comes at once when it is
    complete, and one that the text leaves unfinished is content
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Protocol

from slipring.http.json_text import Malformed
from slipring.http.output_events import ContentDelta, Event, EventWriter, ReasoningDelta
from slipring.http.text_source import Markers, Reader, TextSource
from slipring.http.tool_calls import CallReader, NotACall, Schemas, ToolFormat


class ReasoningFormat(Protocol):
    """How a family of models shows its reasoning, at the beginning of its answer."""

    @property
    def begin(self) -> str: ...

    @property
    def end(self) -> str: ...


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
        whole_calls: bool = False,
    ) -> None:
        """`tools` None: calls are content. `schemas`: the tools there are. `limit`: calls beyond so many are dropped.
        `in_reasoning`: the prompt has already opened the reasoning. `whole_calls`: see `CallReader`."""
        self._source = TextSource()
        self._out = EventWriter(new_id, trims=tools is not None)
        self._calls = CallReader(self._source, self._out, schemas, limit, whole_calls)
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
        return self._calls.num_ended

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
