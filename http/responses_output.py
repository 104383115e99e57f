"""What the model writes, as items of the Responses API and as the events that announce them.

One writer for answers that are streamed and for those that are not, so that both give the same items. Each item goes

    output_item.added · [content_part.added] · deltas · done · [content_part.done] · output_item.done
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import orjson

from slipring.http.frames import json_string
from slipring.http.json_bytes import json_bytes
from slipring.http.output_events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


class EventNumbers:
    """Writes events with their running number."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, kind: str, fields: dict[str, Any]) -> bytes:
        event = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return f"event: {kind}\ndata: ".encode() + json_bytes(event) + b"\n\n"

    def delta(self, before: bytes, text: str, after: bytes) -> bytes:
        frame = before + json_string(text) + after + b',"sequence_number":%d}\n\n' % self._next
        self._next += 1
        return frame


class OutputWriter:
    """Takes the parser's events; `items` grows, and what a stream sends of it comes back."""

    def __init__(self, numbers: EventNumbers) -> None:
        self.items: list[dict[str, Any]] = []
        self._numbers = numbers
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text has not come yet."""
        self._kind: str | None = None
        """Type of the item that is being written."""
        self._pieces: list[str] = []
        self._before = b""
        """A delta of that item, up to its text."""

    def write(self, events: Iterable[Event], logprobs: list[dict[str, Any]]) -> bytes:
        """`logprobs`: of the tokens that these events come from."""
        self._logprobs += logprobs
        return b"".join(map(self._event, events))

    def finish(self, status: str) -> bytes:
        """The end. `status`: of the item that was being written. There is always at least one item."""
        frames = b"" if self.items else self._begin("message")
        return frames + self._end(status)

    def _event(self, event: Event) -> bytes:
        match event:
            case ContentDelta(text):
                return self._switch_to("message") + self._text(text)
            case ReasoningDelta(text):
                self._logprobs.clear()  # they are told of the message's text alone
                return self._switch_to("reasoning") + self._piece(text, b"")
            case ToolCallStart(_, call_id, name):
                self._logprobs.clear()
                return self._end("completed") + self._begin("function_call", call_id=call_id, name=name)
            case ToolArgumentsDelta(_, fragment):
                self._logprobs.clear()
                return self._piece(fragment, b"")
            case ToolCallEnd(_, complete):
                return self._end("completed" if complete else "incomplete")

    def _text(self, text: str) -> bytes:
        told, self._logprobs = self._logprobs, []
        self.items[-1]["content"][0]["logprobs"].extend(told)
        return self._piece(text, b',"logprobs":' + orjson.dumps(told))

    def _piece(self, text: str, after: bytes) -> bytes:
        self._pieces.append(text)
        return self._numbers.delta(self._before, text, after)

    def _switch_to(self, kind: str) -> bytes:
        return b"" if self._kind == kind else self._end("completed") + self._begin(kind)

    def _begin(self, kind: str, **fields: Any) -> bytes:
        item, event = _new_item(kind, fields)
        self._kind, self._pieces = kind, []
        self.items.append(item)
        place = self._place()
        at = orjson.dumps({"type": event, **place})[:-1]
        self._before = f"event: {event}\ndata: ".encode() + at + b',"delta":'
        shown = item if kind == "function_call" else {**item, "content": []}
        frames = self._numbers.frame("response.output_item.added", {"output_index": self._index, "item": shown})
        if kind != "function_call":
            part = item["content"][0]
            frames += self._numbers.frame("response.content_part.added", {**place, "part": part})
        return frames

    def _end(self, status: str) -> bytes:
        if self._kind is None:
            return b""
        kind, text, item, place = self._kind, "".join(self._pieces), self.items[-1], self._place()
        self._kind = None
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            done = {**place, "name": item["name"], "arguments": text}
            frames = self._numbers.frame("response.function_call_arguments.done", done)
        else:
            frames = self._end_part(kind, text, item["content"][0], place)
        return frames + self._numbers.frame("response.output_item.done", {"output_index": self._index, "item": item})

    def _end_part(self, kind: str, text: str, part: dict[str, Any], place: dict[str, Any]) -> bytes:
        part["text"] = text
        if kind == "reasoning":
            frames = self._numbers.frame("response.reasoning_text.done", {**place, "text": text})
        else:
            done = {**place, "text": text, "logprobs": part["logprobs"]}
            frames = self._numbers.frame("response.output_text.done", done)
        return frames + self._numbers.frame("response.content_part.done", {**place, "part": part})

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": self._index}
        return place if self.items[-1]["type"] == "function_call" else {**place, "content_index": 0}


def _new_item(kind: str, fields: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """An item without its text, and the event that carries pieces of it."""
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        return _item("rs", kind, summary=[], content=[part]), "response.reasoning_text.delta"
    if kind == "message":
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return _item("msg", kind, role="assistant", content=[part]), "response.output_text.delta"
    return _item("fc", kind, **fields, arguments=""), "response.function_call_arguments.delta"


def _item(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
