"""From a body of the Responses API to the same request in the words of chat, which `chat.plan_chat` takes on.

instructions               become the first message; those of a previous response are not carried over
message                    text parts are joined without a separator
reasoning, function_call   belong to the assistant's message that they stand beside
function_call_output       becomes a message with role `tool`
images, files, ...         are refused before anything would be fetched
hosted tools               (web_search, mcp, ...) cannot be run here, so the model is not shown them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slipring.http.bodies import ChatBody, FunctionCall, Message, SamplingBody, ToolCall
from slipring.http.errors import ApiError, bad_request
from slipring.http.ranges import check_range
from slipring.http.responses_bodies import FunctionTool, Item, Part, ResponsesBody

_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
LOGPROBS = "message.output_text.logprobs"

_ROLES = ("user", "assistant", "system", "developer")
_NOT_OURS = ("n", "best_of", "echo", "max_tokens", "stream_options")
"""Sampling fields of chat that do not exist here."""


def own_names(body: ResponsesBody) -> dict[str, str]:
    """How chat's fields are called here, for error messages. Tools that are not shown are not counted in chat."""
    names: dict[str, str] = {}
    shown = (i for i, tool in enumerate(body.tools or []) if tool.type == "function")
    for position, index in enumerate(shown):
        names[f"tools[{position}].function.parameters"] = f"tools[{index}].parameters"
        names[f"tools[{position}].function"] = f"tools[{index}]"
        names[f"tools[{position}]"] = f"tools[{index}]"
    return {**names, **_OWN_NAMES}


def chat_body(body: ResponsesBody, items: Sequence[Item], num_previous: int) -> ChatBody:
    """`items`: all that is to be read; those before `num_previous` are from an earlier response.

    Raises ApiError (400) naming the field.
    """
    tools = _tools(body.tools or [])
    tools, tool_choice = _tool_choice(body.tool_choice, tools)
    sampling = {name: getattr(body, name) for name in SamplingBody.__struct_fields__ if name not in _NOT_OURS}
    return ChatBody(
        **sampling,
        messages=_messages(body.instructions, items, num_previous),
        max_completion_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs if LOGPROBS in (body.include or ()) else None,
        tools=tools or None,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        chat_template_kwargs=_template_kwargs(body),
    )


def _messages(instructions: str | None, items: Sequence[Item], num_previous: int) -> list[Message]:
    messages = [Message(role="system", content=instructions)] if instructions else []
    for index, item in enumerate(items):
        where = f"input[{index - num_previous}]"
        match item.type or "message":
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                _add_reasoning(messages, item, where)
            case "function_call":
                message = _own_message(messages, open_for="calls")
                message.tool_calls = [*(message.tool_calls or ()), _tool_call(item, where)]
            case "function_call_output":
                text = _text(item.output, f"{where}.output")
                messages.append(Message(role="tool", content=text, tool_call_id=_needed(item, "call_id", where)))
            case kind:
                raise bad_request(
                    f"`{where}.type` must be `message`, `reasoning`, `function_call`, `function_call_output` or "
                    f"`item_reference`; got {kind[:40]!r}.",
                    f"{where}.type",
                )
    if not messages:
        raise bad_request("`input` must hold at least one item.", "input")
    return messages


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    if item.role not in _ROLES:
        shown = "nothing" if item.role is None else repr(item.role[:40])
        raise bad_request(f"`{where}.role` must be one of {', '.join(_ROLES)}; got {shown}.", f"{where}.role")
    text = _text(item.content, f"{where}.content")
    if item.role == "assistant":
        _own_message(messages, open_for="content").content = text
    else:
        messages.append(Message(role=item.role, content=text))


def _add_reasoning(messages: list[Message], item: Item, where: str) -> None:
    """What only OpenAI can decrypt has no text, and is left out."""
    text = _text(item.content or item.summary or "", f"{where}.content")
    if text:
        message = _own_message(messages, open_for="reasoning")
        message.reasoning_content = (message.reasoning_content or "") + text


def _own_message(messages: list[Message], open_for: str) -> Message:
    """The assistant's message that a further item belongs to: reasoning, then content, then calls."""
    last = messages[-1] if messages else None
    fits = last is not None and last.role == "assistant"
    if last is not None and fits and open_for != "calls":
        fits = last.content is None and last.tool_calls is None
    if last is not None and fits:
        return last
    messages.append(Message(role="assistant"))
    return messages[-1]


def _tool_call(item: Item, where: str) -> ToolCall:
    function = FunctionCall(_needed(item, "name", where), item.arguments)
    return ToolCall(function, _needed(item, "call_id", where), "function")


def _needed(item: Item, name: str, where: str) -> str:
    value = getattr(item, name)
    if not value:
        raise bad_request(f"Missing required field `{where}.{name}`.", f"{where}.{name}", "missing_required_parameter")
    return value


def _text(content: str | list[Part] | None, where: str) -> str:
    if content is None:
        raise bad_request(f"`{where}` must be a string or a list of text parts.", where)
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Part, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
        raise bad_request(
            f"`{where}.type` must be `input_text` or `output_text`: this model reads text only; got "
            f"{part.type[:40]!r}.",
            f"{where}.type",
        )
    if part.text is None:
        raise bad_request(f"Missing required field `{where}.text`.", f"{where}.text", "missing_required_parameter")
    return part.text


# Tools and formats.


def functions(tools: Sequence[FunctionTool]) -> list[FunctionTool]:
    """The tools that the model may be shown."""
    return [tool for tool in tools if tool.type == "function"]


def _tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools) if tool.type == "function"]


def _tool(tool: FunctionTool, where: str) -> dict[str, Any]:
    if not tool.name:
        raise bad_request(f'`{where}` must be {{"type": "function", "name": ..., "parameters": ...}}.', f"{where}.name")
    function = msgspec.to_builtins(tool)
    del function["type"]
    return {"type": "function", "function": function}


def _tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools left to choose from, and how."""
    if choice is None or isinstance(choice, str):
        return tools, choice
    kind, name = choice.get("type"), choice.get("name")
    names = {tool["function"]["name"] for tool in tools}
    if kind == "function":
        if not isinstance(name, str) or name not in names:
            raise bad_request("`tool_choice.name` must be the name of one of the `tools`.", "tool_choice.name")
        return tools, {"type": "function", "function": {"name": name}}
    if kind == "allowed_tools":
        return _allowed_tools(choice, tools)
    raise bad_request(
        '`tool_choice` must be "none", "auto", "required", a function or `allowed_tools`; hosted tools are not run '
        "here.",
        "tool_choice",
    )


def _allowed_tools(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    mode, allowed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise bad_request('`tool_choice.mode` must be "auto" or "required".', "tool_choice.mode")
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
        raise bad_request("`tool_choice.tools` must be a list of tools.", "tool_choice.tools")
    names = {tool.get("name") for tool in allowed if isinstance(tool.get("name"), str)}
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    fields = msgspec.to_builtins(wanted)
    kind = fields.pop("type")
    return {"type": kind, "json_schema": fields} if kind == "json_schema" else {"type": kind}


def _template_kwargs(body: ResponsesBody) -> dict[str, Any] | None:
    """What templates that know efforts of reasoning ask for. Others do not look."""
    kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is not None:
        kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}
    return kwargs or None


def check_body(body: ResponsesBody) -> None:
    """What chat does not know. Raises ApiError (400)."""
    for name in ("prompt", "conversation"):
        if getattr(body, name) is not None:
            raise _not_here(name, f"`{name}` names what is kept at OpenAI; send `input` instead.")
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_request('`truncation` must be "auto" or "disabled".', "truncation")
    if body.background and body.stream:
        raise _not_here("background", "A response in the background cannot be streamed; leave `stream` out.")
    if body.background and body.store is False:
        raise bad_request("`background` needs `store`, or nobody could fetch the response.", "background")
    check_range("top_logprobs", body.top_logprobs)
    if len(body.metadata or ()) > 16:
        raise bad_request("`metadata` may hold at most 16 pairs.", "metadata")


def _not_here(param: str, message: str) -> ApiError:
    return bad_request(message, param, "unsupported_parameter")
