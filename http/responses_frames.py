"""The response object of OpenAI's Responses API, and the stream that ends with it.

    response.created · response.in_progress · items (`responses_output.py`) · response.completed | incomplete | failed

The start waits for the first piece. There is no [DONE].
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from slipring.http.errors import ApiError, engine_failed
from slipring.http.logprobs import LogprobWriter
from slipring.http.output_form import ChoiceParser
from slipring.http.reply import Choice, ReplyHead, Usage
from slipring.http.responses_bodies import ResponsesBody
from slipring.http.responses_output import EventNumbers, OutputWriter
from slipring.http.responses_prompt import functions
from slipring.runtime.request import Delta, SamplingParams

ABORTED = "The request was aborted."


def response_object(head: ReplyHead, body: ResponsesBody, params: SamplingParams, *, stored: bool) -> dict[str, Any]:
    """As it is before anything was generated. `params`: what the request's sampling fields came to."""
    text = body.text
    text_format = text.format if text is not None else None
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": stored,
        "temperature": params.temperature,
        "text": {"format": msgspec.to_builtins(text_format) if text_format is not None else {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_told(tool) for tool in functions(body.tools or [])],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _told(tool: msgspec.Struct) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **msgspec.to_builtins(tool)}


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }


def ended(
    response: dict[str, Any], finish_reason: str | None, output: list[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    """The response once the model has stopped."""
    if finish_reason == "abort":
        return failed(response, engine_failed(ABORTED), output)
    cut = finish_reason == "length"
    return {
        **response,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "completed_at": None if cut else int(time.time()),
        "output": output,
        "usage": usage_fields(usage),
    }


def failed(response: dict[str, Any], error: ApiError, output: list[dict[str, Any]]) -> dict[str, Any]:
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    told = {"code": code, "message": error.message}
    return {**response, "status": "failed", "error": told, "output": output}


def plain_response(
    response: dict[str, Any], choice: Choice, usage: Usage, parser: ChoiceParser, logprobs: LogprobWriter
) -> dict[str, Any]:
    """What `ResponseRenderer` ends with, for an answer that comes at once."""
    writer = OutputWriter(EventNumbers())
    writer.write(parser.events(choice), logprobs.chat(choice.logprobs)["content"])
    writer.finish(_status(choice.finish_reason))
    parser.tell_usage(usage, 0)
    return ended(response, choice.finish_reason, writer.items, usage)


def _status(finish_reason: str | None) -> str:
    """Of the item that came last."""
    return "completed" if finish_reason == "stop" else "incomplete"


class ResponseRenderer:
    """`stream.Renderer` of one response."""

    def __init__(
        self,
        response: dict[str, Any],
        usage: Usage,
        parser: ChoiceParser,
        logprobs: LogprobWriter,
        on_end: Callable[[dict[str, Any]], object],
    ) -> None:
        """`response`: as it is before anything was generated. `on_end` gets it when it has ended in whatever way,
        except that the client went away."""
        self._response = response
        self._usage = usage
        self._parser = parser
        self._logprobs = logprobs
        self._on_end = on_end
        self._numbers = EventNumbers()
        self._writer = OutputWriter(self._numbers)
        self._started = False
        self._finish_reason: str | None = None

    def delta(self, delta: Delta) -> bytes:
        self._usage.add(delta)
        frames = self._start()
        events = self._parser.push(delta)
        self._finish_reason = delta.finish_reason
        entries = self._logprobs.chat(delta.logprobs)["content"] if delta.logprobs else []
        return frames + self._writer.write(events, entries)

    def tail(self) -> bytes:
        self._parser.tell_usage(self._usage, 0)
        frames = self._writer.finish(_status(self._finish_reason))
        return frames + self._final(ended(self._response, self._finish_reason, self._writer.items, self._usage))

    def error(self, error: ApiError) -> bytes:
        frames = self._start()
        if self._writer.items:
            frames += self._writer.finish("incomplete")
        return frames + self._final(failed(self._response, error, self._writer.items))

    def _start(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        fields = {"response": self._response}
        return self._numbers.frame("response.created", fields) + self._numbers.frame("response.in_progress", fields)

    def _final(self, response: dict[str, Any]) -> bytes:
        self._on_end(response)
        return self._numbers.frame(f"response.{response['status']}", {"response": response})
