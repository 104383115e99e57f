"""Typed bodies of Anthropic's Messages API. As in `bodies.py` null is absent and unknown fields are skipped.

Blocks are one struct with the fields of all kinds: which of them a kind needs is checked where it is read
(`messages_prompt.py`), so that a refusal can name the block.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Block(msgspec.Struct):
    """A content block."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    tool_name: str | None = None


class InputMessage(msgspec.Struct):
    role: str
    content: str | list[Block]


class InputTool(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    """What decides the prompt."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Not Anthropic's; as in chat.
    cache_salt: str | None = None
    priority: int | None = None
    seed: int | None = None
