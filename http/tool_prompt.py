"""Tools for models whose chat template knows nothing of them.

Such a model is told in words, at the end of the system message (one is made where there is none), and answers in the
format that `tool_formats.HERMES` reads. Calls and results in the history become text in the same words:

    system      ... <tools> one JSON description per line </tools> ...
    assistant   <tool_call>{"name": ..., "arguments": {...}}</tool_call> behind its content
    tool        a user message, <tool_response>...</tool_response>; neighbours share one
"""

from __future__ import annotations

import json
from typing import Any

_BEFORE = """# Tools

You can call functions to help with the user's request. They are described here, one per line:
<tools>
"""
_AFTER = """
</tools>

To call a function, write a JSON object with its name and arguments between these tags:
<tool_call>
{"name": <function name>, "arguments": <arguments as a JSON object>}
</tool_call>"""


def say_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation without the tool role and without tool calls. `messages` are as templates get them."""
    said: list[dict[str, Any]] = []
    for position, message in enumerate(messages):
        if message["role"] != "tool":
            said.append(_with_calls(message))
        elif position and messages[position - 1]["role"] == "tool":
            said[-1]["content"] += "\n" + _response(message)
        else:
            said.append({"role": "user", "content": _response(message)})
    return said


def say_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with the tools in its system message."""
    text = _BEFORE + "\n".join(_json(tool) for tool in tools) + _AFTER
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    content = f"{first['content']}\n\n{text}" if first["content"] else text
    return [{**first, "content": content}, *messages[1:]]


def _response(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _with_calls(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = "\n".join(map(_call, message["tool_calls"]))
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{content}\n{calls}" if content else calls}


def _call(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{_json(call['function'])}\n</tool_call>"


def _json(value: Any) -> str:
    """As templates print it."""
    return json.dumps(value, ensure_ascii=False)
