"""What a request says about tools, checked: `tools`, `tool_choice`, `parallel_tool_calls`.

`tools` null or empty is absent. `tool_choice` is "none", "auto" (the default with tools), "required" (also called
"any"), or a function by name, which forces one call of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipring.http.bodies import ChatBody
from slipring.http.errors import ApiError, bad_request

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

MANY = 1 << 30


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: list[dict[str, Any]]
    """As OpenAI's chat writes them."""
    schemas: Mapping[str, dict[str, Any]]
    """The parameters' JSON schema by name, in the order of `tools`."""
    forced: tuple[str, ...] = ()
    """A call of one of these must come. Empty: the model chooses."""
    limit: int = MANY
    """Most calls in one answer."""
    names: tuple[str, ...] = ()
    """Of all tools of the request, also those that are not allowed, for errors."""


def check_tools(body: ChatBody) -> ToolUse | None:
    """None: no tools, or none may be used. Raises ApiError naming the field."""
    _refuse_functions(body)
    tools = body.tools or []
    schemas = check_definitions(tools)
    choice, tools = _allowed(body.tool_choice, tools)
    names, schemas = tuple(schemas), {tool["function"]["name"]: schemas[tool["function"]["name"]] for tool in tools}
    if not tools and choice not in (None, "none", "auto"):
        raise bad_request("`tool_choice` needs `tools` to choose from.", "tool_choice")
    forced = _forced(choice, schemas)
    if not tools or choice == "none":
        return None
    single = body.parallel_tool_calls is False or isinstance(choice, dict)
    return ToolUse(tools, schemas, forced, 1 if single else MANY, names)


def _allowed(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    """The choice, and the tools to choose from: of `{"type": "allowed_tools", ...}` its mode, and those it names."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, tools
    where = "tool_choice.allowed_tools"
    given = choice.get("allowed_tools", choice)
    if not isinstance(given, dict) or given.get("mode", "auto") not in ("auto", "required"):
        raise _bad(f"{where}.mode", 'must be "auto" or "required"')
    allowed = given.get("tools")
    if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, dict) for tool in allowed):
        raise _bad(f"{where}.tools", 'must be a list of {"type": "function", "function": {"name": ...}}')
    known = {tool["function"]["name"] for tool in tools}
    names = {_named(tool) for tool in allowed}
    if missing := names - known:
        raise _bad(f"{where}.tools", f"names {min(missing)[:64]!r}, which is not among `tools`")
    return given.get("mode", "auto"), [tool for tool in tools if tool["function"]["name"] in names]


def _forced(choice: str | dict[str, Any] | None, schemas: dict[str, Any]) -> tuple[str, ...]:
    if choice in (None, "none", "auto"):
        return ()
    if choice in ("required", "any"):
        return tuple(schemas)
    name = _named(choice)
    if name not in schemas:
        raise bad_request(f"`tool_choice` names {name[:64]!r}, which is not among `tools`.", "tool_choice")
    return (name,)


def _refuse_functions(body: ChatBody) -> None:
    """OpenAI's former way. Blanks, and a choice among nothing, are no use of it."""
    for name, value in (("functions", body.functions), ("function_call", body.function_call)):
        if value and (name, value) not in (("function_call", "none"), ("function_call", "auto")):
            other = "tools" if name == "functions" else "tool_choice"
            raise bad_request(f"`{name}` is obsolete and not supported: use `{other}`.", name, "unsupported_parameter")


def _named(choice: Any) -> str:
    """The function of `{"type": "function", "function": {"name": ...}}`."""
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]:
            return function["name"]
    raise bad_request(
        '`tool_choice` must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.',
        "tool_choice",
    )


def check_definitions(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each tool's parameters by its name. Raises ApiError naming the field."""
    schemas: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, schema = _checked(tool, f"tools[{index}]")
        if name in schemas:
            raise _bad(f"tools[{index}].function.name", f"must be unique; {name!r} comes twice")
        schemas[name] = schema
    return schemas


def _checked(tool: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    if tool.get("type", "function") != "function":
        raise _bad(f"{where}.type", 'must be "function": this server runs no tools of its own')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _bad(f"{where}.function", 'must be an object with "name", "description" and "parameters"')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(f"{where}.function.name", "must be 1 to 128 letters, digits, '_', '-' or '.'")
    if not isinstance(function.get("description", ""), str | None):
        raise _bad(f"{where}.function.description", "must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise _bad(f"{where}.function.strict", "must be a boolean")
    schema = function.get("parameters")
    if schema is None:
        return name, _NO_PARAMETERS
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise _bad(f"{where}.function.parameters", 'must be a JSON schema of type "object"')
    return name, schema


def _bad(where: str, wanted: str) -> ApiError:
    return bad_request(f"`{where}` {wanted}.", where)
