"""What an answer must look like: `response_format`, `structured_outputs`, and vLLM's older `guided_*`, as one grammar.

At most one of them may be set. The prompt is not touched: a grammar says what may be written, and telling the model
what is wanted is the caller's part. Bodies with the same wish share a compiled grammar.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from slipring.http.bodies import SamplingBody
from slipring.http.errors import bad_request, from_engine
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import EngineError

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

Wish = tuple[GrammarSpec, str]
"""A grammar, and the field that asks for it."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_FORMATS = "text, json_object, json_schema or structural_tag"


async def compile_structured(engine: Engine, body: SamplingBody) -> tuple[Grammar | None, str | None]:
    """What the body's answers must match, and the field that says so. Raises ApiError (400), naming the field and what
    is wrong in it."""
    wish = structured_output(body)
    if wish is None:
        return None, None
    try:
        return await engine.compile_grammar(*wish), wish[1]
    except EngineError as error:
        raise from_engine(error, wish[1]) from None


def structured_output(body: SamplingBody) -> Wish | None:
    """Raises ApiError."""
    wishes = [
        wish
        for wish in (
            _response_format(getattr(body, "response_format", None)),
            _structured_outputs(body.structured_outputs),
            *(_guided(kind, getattr(body, f"guided_{kind}")) for kind in ("json", "regex", "choice", "grammar")),
        )
        if wish is not None
    ]
    if len(wishes) > 1:
        names = " and ".join(f"`{param}`" for _, param in wishes)
        raise bad_request(f"Only one of {names} may be set.", wishes[1][1])
    return wishes[0] if wishes else None


def _response_format(value: Any) -> Wish | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object"), "response_format"
    if kind == "json_schema":
        return _json_schema(value.get("json_schema"))
    if kind == "structural_tag":
        return _structural_tag(value, "response_format")
    raise bad_request(f"`response_format.type` must be {_FORMATS}.", "response_format.type")


def _json_schema(value: Any) -> Wish:
    where = "response_format.json_schema"
    if not isinstance(value, dict):
        message = f'`{where}` must be {{"name": ..., "schema": {{...}}}}.'
        raise bad_request(message, where, "missing_required_parameter" if value is None else "invalid_type")
    if value.get("schema") is None:
        raise bad_request(f"Missing required field `{where}.schema`.", f"{where}.schema", "missing_required_parameter")
    return _json(value["schema"], f"{where}.schema")


def _structured_outputs(value: Any) -> Wish | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request("`structured_outputs` must be an object.", "structured_outputs", "invalid_type")
    given = [kind for kind in _KINDS if value.get(kind) not in (None, False)]
    if len(given) != 1:
        raise bad_request(
            f"`structured_outputs` must hold exactly one of {', '.join(_KINDS)}; got {', '.join(given) or 'none'}.",
            "structured_outputs",
        )
    (kind,) = given
    return _wish(kind, value[kind], f"structured_outputs.{kind}", bool(value.get("disable_any_whitespace")))


def _guided(kind: str, value: Any) -> Wish | None:
    return None if value in (None, "", []) else _wish(kind, value, f"guided_{kind}", False)


def _wish(kind: str, value: Any, param: str, compact: bool) -> Wish:
    if kind == "json":
        return _json(value, param, compact)
    if kind == "json_object":
        return GrammarSpec("json_object", compact=compact), param
    if kind == "choice":
        return _choice(value, param)
    if kind == "structural_tag":
        return _structural_tag(_parsed(value, param), param)
    if not isinstance(value, str):
        raise bad_request(f"`{param}` must be a string.", param, "invalid_type")
    return GrammarSpec("regex" if kind == "regex" else "lark", value), param


def _json(value: Any, param: str, compact: bool = False) -> Wish:
    """A schema as an object, or as its text."""
    schema = _parsed(value, param)
    if not isinstance(schema, dict | bool):
        raise bad_request(f"`{param}` must be a JSON schema: an object.", param, "invalid_type")
    return GrammarSpec("json_schema", _dump(schema), compact), param


def _choice(value: Any, param: str) -> Wish:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise bad_request(f"`{param}` must be a list of strings, none of them empty.", param, "invalid_type")
    return GrammarSpec("choice", _dump(value)), param


def _parsed(value: Any, param: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"`{param}` is not valid JSON: {error}.", param) from None


def _structural_tag(value: Any, param: str) -> Wish:
    """Free text in which each `begin` is followed by JSON that matches its schema, and then by its `end`."""
    structures, triggers = (value.get(name) if isinstance(value, dict) else None for name in ("structures", "triggers"))
    if structures is None or triggers is None or not _are_structures(structures) or not _are_triggers(triggers):
        raise bad_request(
            f'`{param}` must hold `structures`, a list of {{"begin": ..., "schema": {{...}}, "end": ...}}, and '
            "`triggers`, a list of strings with one of which each `begin` starts.",
            param,
        )
    tags, rules = [], []
    for index, structure in enumerate(structures):
        trigger = next((text for text in triggers if structure["begin"].startswith(text)), None)
        if trigger is None:
            where = f"{param}.structures[{index}].begin"
            raise bad_request(f"`{where}` must start with one of the `triggers`.", where)
        rest, end = structure["begin"][len(trigger) :], structure["end"]
        body = " ".join(part for part in (rest and _dump(rest), f"%json {_dump(structure['schema'])}") if part)
        tags.append(f"tag{index}")
        rules.append(f"trigger{index}[lazy]: TEXT {_dump(trigger)}")
        rules.append(f"tag{index}: trigger{index} {body} {_dump(end) if end else ''}")
    lark = ["%llguidance {}", f"start: ({' | '.join(tags)})* tail", "tail: TEXT", *rules, r"TEXT: /(.|\n)*/"]
    return GrammarSpec("lark", "\n".join(lark)), param


def _are_structures(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(item, dict)
            and all(isinstance(item.get(name), str) for name in ("begin", "end"))
            and isinstance(item.get("schema"), dict)
            for item in value
        )
    )


def _are_triggers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(text, str) and text for text in value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
