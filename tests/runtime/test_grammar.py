"""What can be compiled, what is refused and how, and that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json

import pytest

from slipring.runtime.grammar import GrammarCompiler, GrammarSpec
from slipring.runtime.model import open_model
from slipring.runtime.request import InvalidRequestError
from slipring.shm.grammar import Grammar

MODEL = open_model("smollm2")
COMPILER = GrammarCompiler(MODEL.spec)


def compile_(kind: str, value: str = "") -> Grammar:
    return asyncio.run(COMPILER.compile(GrammarSpec(kind, value), "field", MODEL.tokenizer()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_object", ""),
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("regex", "[a-z]+"),
        ("choice", '["yes", "no"]'),
        ("lark", 'start: <|im_start|> "x" %json {"type": "integer"}'),
    ],
)
def test_every_kind_compiles_once(kind: str, value: str) -> None:
    assert compile_(kind, value) is compile_(kind, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "object", "properties": {"p": "q"}},
        {"type": "object", "properties": [1]},
        {"type": "object", "required": "a"},
        {"enum": []},
        {"$ref": "#/definitions/missing"},
        {"type": "array", "items": 3},
        {"anyOf": []},
        {"type": "string", "minLength": 5, "maxLength": 2},
        False,
        {"$ref": "#"},
        {"not": {"type": "string"}},
    ],
    ids=json.dumps,
)
def test_a_bad_schema_is_refused_on_its_field(schema: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compile_("json_schema", json.dumps(schema))
    assert caught.value.param == "field"
