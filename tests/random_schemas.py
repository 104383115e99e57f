"""Random JSON schemas from the vocabulary of the public JSON Schema test suite, bounded so that documents end."""

from __future__ import annotations

import random
from typing import Any

_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_PATTERNS = ("^[a-c]+$", "b", "^a", "z$", r"^\d{2,4}$", "^(x|yy)*$")


def random_schema(seed: int) -> Any:
    chance = random.Random(seed)
    schema = _schema(chance, 3)
    if seed % 5 == 0 and isinstance(schema, dict):
        properties = {"r": {"$ref": "#/$defs/d"}, "s": schema}
        schema = {"$defs": {"d": _schema(chance, 1)}, "type": "object", "properties": properties,
                  "required": ["r"], "additionalProperties": False}  # fmt: skip
    return schema


def _schema(chance: random.Random, depth: int) -> Any:
    leaves = [_string, _number, _integer, _literal, _plain]
    nests = [_object, _object, _array, _union, _all_of, _rare]
    return chance.choice(leaves if depth == 0 else leaves + nests)(chance, depth)


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(0, 3)
    kind = chance.randrange(3)
    if kind == 0:
        return {"type": "string", "minLength": low, "maxLength": low + chance.randint(-1, 5)}
    if kind == 1:
        return {"type": "string", "pattern": chance.choice(_PATTERNS), "maxLength": 12}
    return {"type": "string", "format": chance.choice(_FORMATS)}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    return {"type": "number", chance.choice(["minimum", "exclusiveMinimum"]): low,
            chance.choice(["maximum", "exclusiveMaximum"]): low + chance.randint(1, 90)}  # fmt: skip


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-500, 500)
    return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 900)}


def _literal(chance: random.Random, depth: int) -> dict[str, Any]:
    values = ["a", 'é\n"', 1, 2.5, None, True, [1], {"k": []}, "开"]
    if chance.random() < 0.5:
        return {"const": chance.choice(values)}
    return {"enum": chance.sample(values, chance.randint(1, 4))}


def _plain(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(["a", "b", "name", "名", "x y"], chance.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(0, 2)
    schema: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + chance.randint(0, 2)}
    schema["items"] = _schema(chance, depth - 1)
    if chance.random() < 0.3:
        schema["prefixItems"] = [_schema(chance, depth - 1)]
    return schema


def _union(chance: random.Random, depth: int) -> dict[str, Any]:
    return {chance.choice(["anyOf", "oneOf"]): [_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]}


def _all_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [_integer(chance, 0), {"type": "integer", "minimum": chance.randint(-500, 500)}]}


def _rare(chance: random.Random, depth: int) -> dict[str, Any]:
    """Mostly unsupported: refused, never ignored."""
    inner = _schema(chance, depth - 1)
    return chance.choice([
        {"not": inner}, {"type": "array", "uniqueItems": True, "items": inner, "maxItems": 3},
        {"type": "array", "contains": inner, "maxItems": 3}, {"if": inner, "then": inner},
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": _plain(chance, 0)},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
    ])  # fmt: skip
