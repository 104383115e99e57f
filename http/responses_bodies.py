"""Typed bodies of OpenAI's Responses API. As in `bodies.py` null is absent and unknown fields are skipped.

Items are one struct with the fields of all kinds, used for what comes in, what goes out and what is stored: which of
them a kind needs is checked where it is read (`responses_prompt.py`), so that a refusal can name the item.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slipring.http.bodies import SamplingBody


class Part(msgspec.Struct, omit_defaults=True):
    """A piece of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(msgspec.Struct, omit_defaults=True, kw_only=True):
    type: str | None = None
    """Absent: a message."""
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, and refused: they name what is kept by OpenAI alone.
    prompt: Any = None
    conversation: Any = None
