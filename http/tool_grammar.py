"""The grammar of an answer that must call a tool: well-formed calls whose arguments follow the tool's JSON schema.

Where the model reasons, its reasoning may come first, as it likes, up to the marker that ends it. Calls are written as
the model writes them where that is JSON in plain text, else as plain JSON (`tool_formats.forcible`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from slipring.http.errors import bad_request, from_engine
from slipring.http.json_bytes import json_bytes
from slipring.http.output_form import OutputForm
from slipring.http.reasoning import Reasoning
from slipring.http.tool_formats import LLAMA
from slipring.http.tools import ToolUse
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import InvalidRequestError
from slipring.runtime.schema_times import times_as_patterns

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One layout: blanks are no choice to run away in."""


async def compile_calls(engine: Engine, use: ToolUse, output: OutputForm) -> Grammar:
    """Raises ApiError, naming the tool whose schema cannot be followed."""
    names = use.names or tuple(use.schemas)
    for name in use.forced:
        where = f"tools[{names.index(name)}].function.parameters"
        spec = GrammarSpec("json_schema", _json(use.schemas[name], where))
        await _compile(engine, spec, where)
    return await _compile(engine, GrammarSpec("lark", _lark(engine, use, output)), "tools")


async def _compile(engine: Engine, spec: GrammarSpec, where: str) -> Grammar:
    try:
        return await engine.compile_grammar(spec, where)
    except InvalidRequestError as error:
        raise from_engine(error, where) from None


def _lark(engine: Engine, use: ToolUse, output: OutputForm) -> str:
    before, key, after, separator = _layout(output)
    calls = "call" if use.limit == 1 else f"call ({_text(separator)} call)*"
    rules = [f"start: {_reasoning(engine, output)}{calls}"]
    bodies = " | ".join(f"call{index}" for index in range(len(use.forced)))
    rules.append(f"call: {_text(before)} ({bodies}) {_text(after)}")
    for index, name in enumerate(use.forced):
        opening = f'{orjson.dumps(name).decode()}, "{key}": '
        rules.append(f"call{index}: {_text(opening)} arguments{index}")
        schema = {**times_as_patterns(use.schemas[name]), "x-guidance": _SPACING}
        rules.append(f"arguments{index}: %json {_json(schema, 'tools')}")
    if output.reasoning is not None:
        rules += _reasoning_rules(engine, output.reasoning)
    return "\n".join(rules)


def _layout(output: OutputForm) -> tuple[str, str, str, str]:
    """What comes before a call's name, the key of its arguments, what comes behind, and between calls."""
    if output.tools is LLAMA:
        return '{"name": ', "parameters", "}", "; "
    return '<tool_call>\n{"name": ', "arguments", "}\n</tool_call>", "\n"


def _reasoning(engine: Engine, output: OutputForm) -> str:
    form = output.reasoning
    if form is None:
        return ""
    before = "" if output.in_reasoning else _marker(engine, form.begin)
    return f"({before} reasoning)? " if before else "reasoning "


def _reasoning_rules(engine: Engine, form: Reasoning) -> list[str]:
    if _is_special(engine, form.end):
        return [f"reasoning: /(.|\\n)*/ {_marker(engine, form.end)} /\\n{{0,2}}/"]
    return ["reasoning: thinking /\\n{0,2}/", f"thinking[suffix={_text(form.end)}]: /(.|\\n)*/"]


def _marker(engine: Engine, text: str) -> str:
    """A marker in Lark: by its id where it is a special token, which no text can spell."""
    return f"<[{engine.tokenizer.token_id(text)}]>" if _is_special(engine, text) else _text(text)


def _is_special(engine: Engine, text: str) -> bool:
    return engine.tokenizer.token_id(text) in engine.tokenizer.special_ids


def _text(text: str) -> str:
    return orjson.dumps(text).decode()


def _json(schema: dict[str, Any], where: str) -> str:
    try:
        return json_bytes(schema).decode()
    except RecursionError:
        raise bad_request(f"`{where}` is nested too deeply.", where) from None
