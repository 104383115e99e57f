"""Reader of Qwen3-Coder's tool calls: a tag for the function and one for each parameter, values as plain text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from slipring.http.frames import json_string
from slipring.http.json_calls import read_name
from slipring.http.json_text import normal_value
from slipring.http.text_source import Markers, Reader, TextSource
from slipring.http.tool_calls import CallReader, NotACall

_FUNCTION = "<function="
_PARAMETER = "<parameter="
_KEY = re.compile("[^<>\n]*")


@dataclass(frozen=True)
class XmlCalls:
    """Values are what the tool's schema says: text for strings, else JSON where it is JSON."""

    name: str = "qwen3_coder"
    markers: tuple[str, ...] = ("<tool_call>", _FUNCTION)
    beginnings: tuple[str, ...] = ()
    special: bool = False

    def read(self, calls: CallReader, marker: str) -> Reader[None]:
        source = calls.source
        if marker != _FUNCTION:
            yield from source.next_token()
            if not (yield from source.literal(_FUNCTION)):
                raise NotACall
        more = True
        while more:
            yield from _read_call(calls)
            yield from source.next_token()
            more = yield from source.literal(_FUNCTION)
        yield from source.closer(("</tool_call>",))


def _read_call(calls: CallReader) -> Reader[None]:
    source = calls.source
    name = yield from read_name(source)
    if not (yield from source.literal(">")):
        raise NotACall
    calls.start(name)
    calls.write("{")
    properties = _properties(calls.schemas.get(name))
    complete, separator = True, ""
    while complete and (yield from _begins(source, _PARAMETER)):
        key = yield from source.span(_KEY)
        yield from source.literal(">")
        calls.write(f"{separator}{_quoted(key)}: ")
        complete = yield from _read_parameter(calls, properties.get(key))
        separator = ", "
    complete = complete and (yield from source.more())
    if complete:
        calls.write("}")
    calls.end(complete)
    yield from source.closer(("</function>",))


def _begins(source: TextSource, text: str) -> Reader[bool]:
    yield from source.next_token()
    return (yield from source.literal(text))


def _read_parameter(calls: CallReader, schema: Any) -> Reader[bool]:
    """False: the text ended inside the value, which is then passed on as far as it goes."""
    source, pieces = calls.source, list[str]()
    ends = Markers(("</parameter>", "</function>", _PARAMETER))
    while True:
        text, found = ends.next(source)
        pieces.append(text)
        if found is not None:
            break
        if source.closed:
            calls.write(_quoted("".join(pieces).removeprefix("\n"))[:-1])
            return False
        yield
    if found != "</parameter>":
        source.position -= len(found)  # forgotten; the value ends all the same
    calls.write(_value("".join(pieces).removeprefix("\n").removesuffix("\n"), schema))
    return True


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _value(text: str, schema: Any) -> str:
    types = _types(schema)
    if "string" in types and not (text.strip() == "null" and "null" in types):
        return _quoted(text)
    return normal_value(text) or _quoted(text)


def _types(schema: Any) -> set[str]:
    """The types that a schema admits, as far as it says so at the top."""
    if not isinstance(schema, dict):
        return set()
    found = schema.get("type")
    types = {found} if isinstance(found, str) else set(found) if isinstance(found, list) else set()
    for choice in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        types |= _types(choice)
    if any(isinstance(value, str) for value in (*_list(schema.get("enum")), schema.get("const"))):
        types.add("string")
    return types


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _quoted(text: str) -> str:
    return json_string(text).decode()
