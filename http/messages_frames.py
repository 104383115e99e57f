"""What Anthropic's Messages API sends: the content blocks of an answer, at once or as server-sent events.

    message_start · (content_block_start · content_block_delta... · content_block_stop)... · message_delta ·
    message_stop

Every event is named twice, in its `event:` line and in its `type`. There is no [DONE]; a failure is an `error` event
and the end. The start waits for the first piece, when it is known how much of the prompt was cached.
"""

from __future__ import annotations

from typing import Any

import orjson

from slipring.http.errors import ApiError
from slipring.http.frames import json_string
from slipring.http.messages_errors import error_body
from slipring.http.output_events import (
    ContentDelta,
    Event,
    ParsedCall,
    ParsedText,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from slipring.http.output_form import ChoiceParser
from slipring.http.reply import ReplyHead, Usage
from slipring.runtime.request import Delta


def message(head: ReplyHead, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """Without the reason why it stopped."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_fields(usage),
    }


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Here cached tokens are counted apart from the others."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_generated,
    }


def stop_fields(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """`finish_reason`: as chat says it."""
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": "tool_use" if finish_reason == "tool_calls" else "end_turn", "stop_sequence": None}


def content_blocks(parsed: ParsedText) -> list[dict[str, Any]]:
    """Never empty: clients read the first block unasked."""
    blocks: list[dict[str, Any]] = []
    if parsed.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.content or not parsed.calls:
        blocks.append({"type": "text", "text": parsed.content})
    return blocks + [_tool_use(call) for call in parsed.calls]


def _tool_use(call: ParsedCall) -> dict[str, Any]:
    # An input is an object. What max_tokens cut in the middle is none: the reason to stop says so.
    arguments = orjson.loads(call.arguments or b"{}") if call.complete else {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


class MessageRenderer:
    """`stream.Renderer` of one message."""

    def __init__(self, head: ReplyHead, usage: Usage, parser: ChoiceParser) -> None:
        self._head = head
        self._usage = usage
        self._parser = parser
        self._started = False
        self._num_blocks = 0
        self._open: type[Event] | None = None
        """The kind of piece that the open block is made of."""
        self._before = b""
        """A delta of the open block, up to its text."""
        self._stop: dict[str, Any] = {}

    def delta(self, delta: Delta) -> bytes:
        self._usage.add(delta)
        frames = b""
        if not self._started:
            self._started = True
            frames = _frame("message_start", {"message": message(self._head, [], self._usage)})
        frames += b"".join(map(self._event, self._parser.push(delta)))
        if delta.finish_reason is not None:
            self._stop = stop_fields(self._parser.finish_reason(delta.finish_reason), delta.stop_reason)
        return frames

    def tail(self) -> bytes:
        frames = b"" if self._num_blocks else self._begin(ContentDelta, _TEXT)
        return (
            frames
            + self._end()
            + _frame("message_delta", {"delta": self._stop, "usage": usage_fields(self._usage)})
            + _frame("message_stop", {})
        )

    def error(self, error: ApiError) -> bytes:
        return _frame("error", error_body(error))

    def _event(self, event: Event) -> bytes:
        match event:
            case ContentDelta(text):
                return self._piece(ContentDelta, _TEXT, text)
            case ReasoningDelta(text):
                return self._piece(ReasoningDelta, _THINKING, text)
            case ToolCallStart(_, call_id, name):
                start = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._begin(ToolArgumentsDelta, (start, "input_json_delta", "partial_json"))
            case ToolArgumentsDelta(_, fragment):
                return self._before + json_string(fragment) + b"}}\n\n"
            case ToolCallEnd():
                return self._end()

    def _piece(self, kind: type[Event], block: _Block, text: str) -> bytes:
        frames = b"" if self._open is kind else self._begin(kind, block)
        return frames + self._before + json_string(text) + b"}}\n\n"

    def _begin(self, kind: type[Event], block: _Block) -> bytes:
        start, delta_type, field = block
        frames = self._end()
        index = self._num_blocks
        self._open = kind
        self._num_blocks += 1
        self._before = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (index, delta_type.encode(), field.encode())
        )
        return frames + _frame("content_block_start", {"index": index, "content_block": start})

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _frame("content_block_stop", {"index": self._num_blocks - 1})


_Block = tuple[dict[str, Any], str, str]
"""How a block begins, and the type and field of its deltas."""
_TEXT: _Block = ({"type": "text", "text": ""}, "text_delta", "text")
_THINKING: _Block = ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")


def _frame(name: str, fields: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: ".encode() + orjson.dumps({"type": name, **fields}) + b"\n\n"
