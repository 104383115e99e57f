"""A refused schema is told where it is wrong."""

from __future__ import annotations

import json

import pytest

from slipring.runtime.request import InvalidRequestError
from tests.runtime.test_grammar import compile_


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"items": {"not": {}}}}}, ("not", "properties.a.items")),
        ({"anyOf": [{"type": "null"}, {"type": "number", "minimum": "x"}]}, ("minimum", "anyOf[1]")),
        ({"$defs": {"d": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/d"}}, ("uniqueItems", "items")),
    ],
)
def test_the_part_is_named(schema: object, words: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compile_("json_schema", json.dumps(schema))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_gbnf_is_understood_and_its_mistakes_are_told() -> None:
    assert compile_("lark", 'root ::= "a" | "b"').text
    with pytest.raises(InvalidRequestError):
        compile_("lark", 'root ::= "a" | (')
