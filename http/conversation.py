"""From chat messages to the prompt's text: roles, content parts, tool calls, and the model's own template.

Rules where clients differ:
  text parts            are joined without a separator
  assistant             content may be null or absent; two in a row are passed on as they are
  tool call arguments   that hold a JSON object reach the template as that object, anything else as text; "" is {}
  images, audio, files  are refused before anything would be fetched
  function              OpenAI's former role, is `tool`
  special tokens        that are written in messages stay text, so that nobody can forge the end of a turn
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from slipring.http.bodies import ChatBody, ContentPart, Message, TokenizeBody, ToolCall
from slipring.http.errors import bad_request
from slipring.http.ranges import ROLES
from slipring.http.tool_prompt import say_calls, say_tools
from slipring.runtime.chat_template import RESERVED, TemplateError

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine


def render(engine: Engine, body: ChatBody | TokenizeBody, tools: list[dict[str, Any]] | None) -> list[str]:
    """The prompt's text, in parts that are tokenized one by one (`ChatTemplate.render_parts`).

    Raises ApiError (400), with the template's own sentence when it refuses.
    """
    messages = _messages(body.messages or [])
    template = engine.chat_template
    if template is None:
        raise bad_request("This model has no chat template; use /v1/completions.", "messages", "no_chat_template")
    continue_final = bool(body.continue_final_message)
    kwargs = _template_kwargs(body)
    _check_ending(body, messages)
    try:
        if not template.takes_calls:
            messages = say_calls(messages)
        if tools and not template.takes_tools:
            messages, tools = say_tools(messages, tools), None
        return template.render_parts(
            messages,
            tools=tools or None,
            add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
            continue_final_message=continue_final,
            **kwargs,
        )
    except TemplateError as error:
        raise bad_request(f"The chat template refused the conversation: {error}", "messages") from None
    except RecursionError:
        raise bad_request("The conversation is nested too deeply for the chat template.", "messages") from None


def prefill(messages: list[Message]) -> str:
    """Content of a final assistant message, which `echo` puts before what is generated; else nothing."""
    last = messages[-1]
    return _content(last, len(messages) - 1) if last.role == "assistant" else ""


def _template_kwargs(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    if body.chat_template is not None:
        raise bad_request("Templates in requests are not accepted; the model's own is used.", "chat_template")
    kwargs = body.chat_template_kwargs or {}
    if reserved := sorted(RESERVED.intersection(kwargs)):
        raise bad_request(f"`chat_template_kwargs` must not hold `{reserved[0]}`.", "chat_template_kwargs")
    if bad := [name for name in kwargs if not name.isidentifier()]:
        raise bad_request(f"`chat_template_kwargs`: {bad[0][:40]!r} is not a name.", "chat_template_kwargs")
    return kwargs


def _check_ending(body: ChatBody | TokenizeBody, messages: list[dict[str, Any]]) -> None:
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise bad_request(
            "`add_generation_prompt` and `continue_final_message` cannot both be true.", "continue_final_message"
        )
    if messages[-1]["role"] != "assistant":
        raise bad_request(
            "`continue_final_message` needs a final message with role `assistant`.", "continue_final_message"
        )


def _messages(messages: list[Message]) -> list[dict[str, Any]]:
    if not messages:
        raise bad_request("`messages` must hold at least one message.", "messages")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: Message, index: int) -> dict[str, Any]:
    if message.role not in ROLES:
        raise bad_request(
            f"`messages[{index}].role` must be one of {', '.join(ROLES)}; got {message.role[:40]!r}.",
            f"messages[{index}].role",
        )
    role = "tool" if message.role == "function" else message.role
    rendered: dict[str, Any] = {"role": role, "content": _content(message, index)}
    if message.tool_calls:
        _check_role(message, index)
        rendered["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
        if message.content is None:
            del rendered["content"]  # absent rather than empty: the template decides what it prints
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def _check_role(message: Message, index: int) -> None:
    if message.role != "assistant":
        where = f"messages[{index}].tool_calls"
        raise bad_request(f"`{where}` belongs to messages with role `assistant`.", where)


def _content(message: Message, index: int) -> str:
    where = f"messages[{index}].content"
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"`{where}` must be a string or a list of text parts.", where)
    if isinstance(message.content, str):
        return message.content
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(message.content))


def _part(part: ContentPart, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in ("text", "input_text", "output_text"):
        raise bad_request(
            f"`{where}.type` must be `text`: this model reads text only; got {part.type[:40]!r}.",
            f"{where}.type",
        )
    if part.text is None:
        raise bad_request(f"Missing required field `{where}.text`.", f"{where}.text", "missing_required_parameter")
    return part.text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id or "", "type": "function", "function": function}


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
