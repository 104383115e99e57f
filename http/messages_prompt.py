"""From a body of Anthropic's Messages API to the same request in the words of chat, which `chat.plan_chat` takes on.

system               becomes the first message; what Claude Code writes there for billing alone is left out
text                 blocks of one message are joined without a separator
tool_use, thinking   of an assistant message become its tool calls and its reasoning; redacted thinking is left out
tool_result          becomes a message with role `tool`, in its place between the user's texts
image, document, ... are refused before anything would be fetched
last assistant       message is continued, unless it is empty
server tools         (those without a schema) cannot be run here, so the model is not shown them

Fields that only steer Anthropic's service (cache_control, metadata, betas, context_management) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slipring.http.bodies import ChatBody, FunctionCall, Message, ToolCall
from slipring.http.errors import bad_request
from slipring.http.messages_bodies import Block, CountTokensBody, InputMessage, InputTool, MessagesBody

_OWN_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}

_USER_ROLES = ("user", "ctx", "msg")
"""The last two are Claude Code's: context that it adds by itself."""
_BILLING = "x-anthropic-billing-header:"
"""Differs in every request, so it would keep everything behind it out of the prefix cache."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TEXT_ONLY = "this model reads text only"


def own_names(body: CountTokensBody) -> dict[str, str]:
    """How chat's fields are called here, for error messages. Tools that are not shown are not counted in chat."""
    names: dict[str, str] = {}
    shown = (i for i, tool in enumerate(body.tools or []) if not _runs_on_server(tool))
    for position, index in enumerate(shown):
        names[f"tools[{position}].function.parameters"] = f"tools[{index}].input_schema"
        names[f"tools[{position}].function"] = f"tools[{index}]"
        names[f"tools[{position}]"] = f"tools[{index}]"
    return {**names, **_OWN_NAMES}


def chat_body(body: CountTokensBody) -> ChatBody:
    """Raises ApiError (400) naming the field."""
    messages = [*_system(body.system), *_messages(body.messages)]
    continues = _continues(body.messages)
    if body.messages and body.messages[-1].role == "assistant" and not continues:
        messages.pop()
    tools = _tools(body.tools or [])
    chat = ChatBody(
        messages=messages,
        model=body.model,
        tools=tools or None,
        tool_choice=_tool_choice(body, tools),
        continue_final_message=continues,
        chat_template_kwargs=_thinking(body),
        response_format=_response_format(body),
    )
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if isinstance(body, MessagesBody):
        _add_sampling(chat, body)
    return chat


def _add_sampling(chat: ChatBody, body: MessagesBody) -> None:
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    for name in ("temperature", "top_p", "top_k", "stream", "seed", "cache_salt", "priority"):
        setattr(chat, name, getattr(body, name))


def _system(system: str | list[Block] | None) -> list[Message]:
    if isinstance(system, list):
        texts = [_text(block, f"system[{i}]") for i, block in enumerate(system)]
        system = "".join(text for text in texts if not text.startswith(_BILLING))
    return [Message(role="system", content=system)] if system else []


def _messages(messages: list[InputMessage]) -> Iterable[Message]:
    if not messages:
        raise bad_request("`messages` must hold at least one message.", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        blocks = [Block("text", message.content)] if isinstance(message.content, str) else message.content
        if message.role in _USER_ROLES:
            yield from _user(blocks, f"{where}.content")
        elif message.role == "assistant":
            yield _assistant(blocks, f"{where}.content")
        elif message.role == "system":
            yield Message(role="system", content=_joined(blocks, f"{where}.content"))
        else:
            raise bad_request(
                f"`{where}.role` must be `user`, `assistant` or `system`; got {message.role[:40]!r}.", f"{where}.role"
            )


def _user(blocks: list[Block], where: str) -> Iterable[Message]:
    """Texts and tool results in their order; texts that stand together are one message."""
    texts: list[str] = []
    num_results = 0
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_text(block, f"{where}[{i}]"))
            continue
        if texts:
            yield Message(role="user", content="".join(texts))
            texts = []
        yield _tool_result(block, f"{where}[{i}]")
        num_results += 1
    if texts or not num_results:
        yield Message(role="user", content="".join(texts))


def _tool_result(block: Block, where: str) -> Message:
    if not block.tool_use_id:
        raise bad_request(f"Missing required field `{where}.tool_use_id`.", f"{where}.tool_use_id")
    content = block.content or ""
    text = content if isinstance(content, str) else _joined(content, f"{where}.content")
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _assistant(blocks: list[Block], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(_needed(block.thinking, f"{where}[{i}].thinking"))
        elif block.type == "tool_use":
            calls.append(_tool_use(block, f"{where}[{i}]"))
        elif block.type != "redacted_thinking":
            texts.append(_text(block, f"{where}[{i}]"))
    return Message(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        reasoning_content="".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )


def _tool_use(block: Block, where: str) -> ToolCall:
    name = _needed(block.name, f"{where}.name")
    return ToolCall(FunctionCall(name, block.input or {}), _needed(block.id, f"{where}.id"), "function")


def _joined(blocks: list[Block], where: str) -> str:
    return "".join(_text(block, f"{where}[{i}]") for i, block in enumerate(blocks))


def _text(block: Block, where: str) -> str:
    if block.type == "text":
        return _needed(block.text, f"{where}.text")
    if block.type == "tool_reference":
        return _needed(block.tool_name, f"{where}.tool_name")
    reason = _TEXT_ONLY if block.type in ("image", "document") else "blocks of this type do not belong here"
    raise bad_request(f"`{where}.type` must be `text`: {reason}; got {block.type[:40]!r}.", f"{where}.type")


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise bad_request(f"Missing required field `{where}`.", where, "missing_required_parameter")
    return value


def _continues(messages: list[InputMessage]) -> bool:
    """The answer continues the last message."""
    last = messages[-1]
    if last.role != "assistant":
        return False
    if isinstance(last.content, str):
        return bool(last.content)
    if any(block.type == "tool_use" for block in last.content):
        where = f"messages[{len(messages) - 1}]"
        raise bad_request(f"`{where}` uses a tool: a message with its `tool_result` must follow.", where)
    return any(block.text for block in last.content)


def _tools(tools: list[InputTool]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not _runs_on_server(tool)]


def _runs_on_server(tool: InputTool) -> bool:
    """Or is one whose schema Anthropic's models know by heart."""
    return tool.input_schema is None and tool.type not in (None, "custom")


def _tool(tool: InputTool, where: str) -> dict[str, Any]:
    if tool.input_schema is None:
        raise bad_request(f"Missing required field `{where}.input_schema`.", f"{where}.input_schema")
    function: dict[str, Any] = {"name": _needed(tool.name, f"{where}.name")}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(body: CountTokensBody, tools: list[dict[str, Any]]) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        name = _needed(choice.name, "tool_choice.name")
        if all(tool["function"]["name"] != name for tool in tools):
            raise bad_request(f"`tool_choice.name` must be one of the `tools`; got {name[:100]!r}.", "tool_choice.name")
        return {"type": "function", "function": {"name": name}}
    if choice.type not in _TOOL_CHOICES:
        raise bad_request("`tool_choice.type` must be `auto`, `any`, `tool` or `none`.", "tool_choice.type")
    if choice.type == "any" and not tools:
        raise bad_request("`tool_choice` of type `any` needs `tools`.", "tool_choice")
    return _TOOL_CHOICES[choice.type] if tools else None


def _thinking(body: CountTokensBody) -> dict[str, Any] | None:
    """What templates that can leave the thinking out ask for. Others do not look."""
    if body.thinking is None:
        return None
    if body.thinking.type not in ("enabled", "adaptive", "disabled"):
        raise bad_request("`thinking.type` must be `enabled`, `adaptive` or `disabled`.", "thinking.type")
    wanted = body.thinking.type != "disabled"
    return {"enable_thinking": wanted, "thinking": wanted}


def _response_format(body: CountTokensBody) -> dict[str, Any] | None:
    config = body.output_config
    wanted = (config and config.format) or body.output_format
    if not wanted:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise bad_request(
            '`output_config.format` must be {"type": "json_schema", "schema": {...}}.', "output_config.format"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema, "strict": True}}
