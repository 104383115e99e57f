"""What can be compiled, what is refused and how, and that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

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
        ("choice", json.dumps(["again"] * 50_000)),
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


def nested(before: str, depth: int, inner: str = "{}", after: str = "}") -> str:
    return before * depth + inner + after * depth


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", json.dumps({"type": "string", "pattern": "[ab]*a[ab]{20}"})),
        ("json_schema", json.dumps({"type": "string", "pattern": "((a{0,99}){0,99}){0,99}"})),
        ("json_schema", json.dumps({"type": "string", "pattern": "(" * 60_000 + "a" + ")" * 60_000})),
        ("json_schema", json.dumps({"type": "string", "pattern": "(?<=x)*"})),
        ("json_schema", json.dumps({"type": "string", "maxLength": 10**9})),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "integer"}})),
        ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}})),
        ("json_schema", json.dumps({"properties": {f"p{i}": {"type": "null"} for i in range(5000)} | {"q": False}})),
        ("json_schema", json.dumps({"enum": [str(i) for i in range(10**5)]})),
        ("json_schema", json.dumps({"allOf": [{"$ref": "#"}]})),
        ("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
        ("json_schema", nested('{"items":', 5000)),
        ("json_schema", nested('{"items":', 5000, '{"format":"time"}')),
        ("json_schema", nested('{"items":', 60, '{"not":{}}')),
        ("json_schema", nested('{"anyOf":[{"type":"null"},', 50, '{"not":{}}', "]}")),
        ("regex", "(" * 60_000 + "a" + ")" * 60_000),
        ("regex", "(a{0,999}){0,999}"),
        ("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("lark", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("lark", "start: start"),
    ],
    ids=lambda value: value[:40],
)
def test_what_would_take_for_ever_is_refused_or_cheap(kind: str, value: str) -> None:
    """Within seconds, with a short reason, while the loop goes on."""

    async def main() -> int:
        work = asyncio.ensure_future(COMPILER.compile(GrammarSpec(kind, value), "field", MODEL.tokenizer()))  # type: ignore[arg-type]
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
            assert turns < 20_000
        try:
            await work
        except InvalidRequestError as refused:
            assert len(str(refused)) < 700
        return turns

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("lark", 'root ::= "a" root', "nothing can match it that ever ends"),
        (
            "lark",
            'start: "a" (first | second)\nfirst: "b" second\nsecond: "c" first',
            "nothing can match it that ever ends",
        ),
        ("regex", "a{1000000}", "cannot be used: no answer can get beyond its first token"),
        ("choice", json.dumps([f"{i:x}" for i in range(66_000)]), "it has 66000 different choices: at most 60000$"),
        ("lark", "start: " + " | ".join(['"a"'] * 70_000), "it has more than 65,525 parts .* expression$"),
    ],
)
def test_what_could_never_be_followed_to_its_end_is_refused_before_an_answer_begins(
    kind: str, value: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        compile_(kind, value)
    assert caught.value.param == "field"


def test_what_a_schema_cannot_say_is_told_without_options_that_nobody_can_set() -> None:
    schema = {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}}
    with pytest.raises(InvalidRequestError, match=r"use anyOf \(at properties\.a\)") as caught:
        compile_("json_schema", json.dumps(schema))
    assert "option" not in str(caught.value)


@pytest.mark.parametrize(
    ("most", "number"),
    [(50, 50), pytest.param(60_000, 60_000, marks=pytest.mark.slow)],  # these take 6 seconds
)
def test_as_many_choices_as_may_be_are_served(most: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipring.runtime.grammar._MOST_CHOICES", most)
    choices = [f"{i:x}" for i in range(number + 1)]
    assert compile_("choice", json.dumps([*choices[:number], choices[0]]))
    with pytest.raises(InvalidRequestError, match=f"it has {number + 1} different choices: at most {most}$"):
        compile_("choice", json.dumps(choices))


CHAINS = """
import asyncio, json, sys
from slipring.runtime.grammar import GrammarCompiler, GrammarSpec
from slipring.runtime.model import open_model

n, model = 3000, open_model("smollm2")
objects = {f"a{i}": {"properties": {"b": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["b"]} for i in range(n)}
schema = {"$ref": "#/$defs/a0", "$defs": {**objects, f"a{n}": {"type": "integer"}}}
rules = "\\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(n)), f'a{n}: "x"'])
for kind, text in (("json_schema", json.dumps(schema)), ("lark", rules)):
    compiler = GrammarCompiler(model.spec)
    asyncio.run(compiler.compile(GrammarSpec(kind, text), "field", model.tokenizer()))
    compiler.close()
"""


def test_long_chains_of_rules_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
