"""Chat's answers where something is taken apart: reasoning, content and tool calls, in a message or in chunks.

chunks    role · reasoning, content, call (index, id, name) and argument pieces, in their order · {} with finish_reason

A delta's events become a chunk each. Log-probabilities of its tokens go with the first of them, or alone when the text
of all of them is held back; so all of a choice's tokens come once and in order, as in the message.
"""

from __future__ import annotations

from typing import Any

import orjson

from slipring.http.frames import ChatRenderer, json_string
from slipring.http.logprobs import LogprobWriter
from slipring.http.output_events import (
    ContentDelta,
    Event,
    ParsedCall,
    ParsedText,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from slipring.http.output_form import OutputForm
from slipring.http.reply import ReplyHead, Usage
from slipring.runtime.request import Delta


def message_fields(parsed: ParsedText, echo: str = "") -> dict[str, Any]:
    """Of a message: `content` is null when there are only calls; what there is none of is absent."""
    content = echo + parsed.content
    fields: dict[str, Any] = {"content": None if parsed.calls and not content else content}
    if parsed.reasoning is not None:
        fields |= {"reasoning_content": parsed.reasoning, "reasoning": parsed.reasoning}
    if parsed.calls:
        fields["tool_calls"] = [_call(call) for call in parsed.calls]
    return fields


def _call(call: ParsedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ParsedChatRenderer(ChatRenderer):
    def __init__(
        self,
        head: ReplyHead,
        usage: Usage,
        logprobs: LogprobWriter,
        echo: list[str],
        *,
        form: OutputForm,
        usage_at_end: bool = False,
        usage_in_every: bool = False,
    ) -> None:
        super().__init__(head, usage, logprobs, echo, usage_at_end=usage_at_end, usage_in_every=usage_in_every)
        self._parsers = [form.parser() for _ in echo]
        choices = [b',"choices":[{"index":%d,"delta":{' % index for index in range(len(echo))]
        self._chunk = [b"data: " + self._head + choice for choice in choices]

    def delta(self, delta: Delta) -> bytes:
        index, parser = delta.index, self._parsers[delta.index]
        events = parser.push(delta)
        self._usage.add(delta)
        parser.tell_usage(self._usage, index)
        frames = b"" if self._started[index] else self._begin(index)
        logprobs = self._logprobs_of(delta)
        for event in events:
            if body := _delta_body(event):
                frames += self._chunk[index] + body + self._middle(logprobs) + self._close()
                logprobs = b"null"
        if delta.finish_reason is not None:
            return frames + self._ending(delta, parser.finish_reason(delta.finish_reason), logprobs)
        if logprobs != b"null":
            frames += self._chunk[index] + self._middle(logprobs) + self._close()
        return frames

    def _begin(self, index: int) -> bytes:
        self._started[index] = True
        frames = self._first(index)
        if echo := self._echo[index]:
            frames += self._chunk[index] + b'"content":' + json_string(echo) + self._middle(b"null") + self._close()
        return frames

    def _ending(self, delta: Delta, finish_reason: str | None, logprobs: bytes) -> bytes:
        ends = orjson.dumps(finish_reason) + b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        fingerprint = b"" if self._usage_at_end else self._fingerprint
        return self._chunk[delta.index] + self._middle(logprobs, ends) + fingerprint + self._close()


def _delta_body(event: Event) -> bytes:
    """The inside of a chunk's `delta`; empty for an event that shows in nothing."""
    match event:
        case ContentDelta(text):
            return b'"content":' + json_string(text)
        case ReasoningDelta(text):
            said = json_string(text)
            return b'"reasoning_content":' + said + b',"reasoning":' + said
        case ToolCallStart(index, call_id, name):
            function = orjson.dumps({"name": name, "arguments": ""})
            named = b'"id":' + orjson.dumps(call_id) + b',"type":"function","function":' + function
            return b'"tool_calls":[{"index":%d,' % index + named + b"}]"
        case ToolArgumentsDelta(index, fragment):
            said = json_string(fragment)
            return b'"tool_calls":[{"index":%d,"function":{"arguments":' % index + said + b"}}]"
        case _:
            return b""
