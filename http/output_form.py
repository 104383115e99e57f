"""Which parsers an answer goes through.

`OutputRules` once per model, `OutputForm` once per request, `ChoiceParser` once per choice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipring.http.output_events import Event, ParsedText, join_events
from slipring.http.output_parser import OutputParser
from slipring.http.reasoning import Reasoning, detect_reasoning, reasoning_format
from slipring.http.reply import Choice, Usage
from slipring.http.tool_calls import ToolFormat
from slipring.http.tool_formats import detect_tool_format, forcible, tool_format
from slipring.http.tools import MANY, ToolUse
from slipring.runtime.request import Delta

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

_ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Mistral's templates take nothing else."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How the answers to one request are taken apart."""

    tools: ToolFormat | None = None
    """None: what looks like a call is content."""
    reasoning: Reasoning | None = None
    schemas: Mapping[str, Any] = field(default_factory=dict)
    limit: int = MANY
    whole_calls: bool = False
    """Calls come when they are complete: half a one would end with the finish reason of a whole one."""
    in_reasoning: bool = False
    """The prompt has opened the reasoning."""
    end_of_reasoning: int | None = None
    """The token that ends it, where it is one."""

    @property
    def plain(self) -> bool:
        """There is nothing to take apart: all text is content."""
        return self.tools is None and self.reasoning is None

    @property
    def needs_special_tokens(self) -> bool:
        """Markers are special tokens, which the text must show for the parser to see them."""
        return (self.tools is not None and self.tools.special) or (
            self.reasoning is not None and self.reasoning.special
        )

    def parser(self, new_id: Callable[[], str] = call_id) -> ChoiceParser:
        return ChoiceParser(self, _mistral_id if self.tools is not None and self.tools.name == "mistral" else new_id)


PLAIN = OutputForm()


class OutputRules:
    """What the model writes, by flags or by its chat template."""

    def __init__(self, engine: Engine, tool_call_parser: str, reasoning_parser: str) -> None:
        """By the names that the flags take; an unknown one is `none`."""
        template = engine.chat_template.source if engine.chat_template is not None else None
        self._tools = detect_tool_format(template) if tool_call_parser == "auto" else tool_format(tool_call_parser)
        auto = reasoning_parser == "auto"
        self._reasoning = detect_reasoning(template) if auto else reasoning_format(reasoning_parser)
        self._end = None if self._reasoning is None else engine.tokenizer.token_id(self._reasoning.end)

    def form(self, use: ToolUse | None, prompt: str, stops: bool) -> OutputForm:
        """`prompt`: as the chat template rendered it. `stops`: text or tokens of the request's end the answer, in the
        middle of a call or not."""
        reasoning = self._reasoning
        if use is None and reasoning is None:
            return PLAIN
        tools = None if use is None else self._tools
        if use is not None and use.forced:
            tools = forcible(tools)
        return OutputForm(
            tools=tools,
            reasoning=reasoning,
            schemas=use.schemas if use is not None else PLAIN.schemas,
            limit=use.limit if use is not None else PLAIN.limit,
            whole_calls=stops,
            in_reasoning=reasoning is not None and reasoning.open_in(prompt),
            end_of_reasoning=self._end,
        )


class ChoiceParser:
    """One choice's deltas taken apart."""

    def __init__(self, form: OutputForm, new_id: Callable[[], str]) -> None:
        self._parser = OutputParser(
            form.tools,
            form.reasoning,
            new_id=new_id,
            schemas=form.schemas,
            limit=form.limit,
            whole_calls=form.whole_calls,
            in_reasoning=form.in_reasoning,
        )
        self._end = form.end_of_reasoning
        self._num_counted = 0
        self._reasons = form.reasoning is not None
        self._counts = self._reasons

    @property
    def num_reasoning(self) -> int:
        """Tokens of the reasoning so far, its markers included. Where no token of its own ends it, a delta that does
        counts whole."""
        return self._num_counted if self._parser.reasoned else 0

    @property
    def num_finished_calls(self) -> int:
        return self._parser.num_finished_calls

    def push(self, delta: Delta) -> list[Event]:
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if self._counts:
            self._count(delta.token_ids)
        return events

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._end is None:
            self._counts = self._parser.undecided
        elif self._end in token_ids:
            token_ids = token_ids[: token_ids.index(self._end) + 1]
            self._counts = False
        self._num_counted += len(token_ids)

    def events(self, choice: Choice) -> list[Event]:
        """Of a choice that has ended, piece by piece, so that tokens are counted as in a stream."""
        events: list[Event] = []
        end = 0
        for text, size in zip(choice.pieces, choice.sizes, strict=True):
            begin, end = end, end + size
            events += self.push(Delta(index=0, text=text, token_ids=choice.token_ids[begin:end]))
        return events + self.push(Delta(index=0, finish_reason=choice.finish_reason))

    def read(self, choice: Choice) -> ParsedText:
        """A choice that has ended, as an answer that comes at once shows it."""
        return join_events(self.events(choice))

    def tell_usage(self, usage: Usage, index: int) -> None:
        if self._reasons:
            usage.set_reasoning(index, self.num_reasoning)

    def finish_reason(self, reason: str | None) -> str | None:
        """What the API says: `tool_calls` for an answer that ended by itself with calls, however they came about."""
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason
