"""`time` and `date-time` as patterns: what they allow is valid, and nothing that only looks like a format changes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from slipring.runtime.schema_times import times_as_patterns


@pytest.mark.parametrize("name", ["time", "date-time"])
@given(data=st.data())
def test_what_the_pattern_allows_is_valid(name: str, data: st.DataObject) -> None:
    pattern = times_as_patterns({"type": "string", "format": name})["pattern"]
    text = data.draw(st.from_regex(pattern.removesuffix("$") + r"\Z"))
    checker = Draft202012Validator.FORMAT_CHECKER
    validator = Draft202012Validator({"format": name}, format_checker=checker)
    assert name in checker.checkers and validator.is_valid(text), text


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("time", "23:59:59Z", True),
        ("time", "11:18:60Z", False),
        ("time", "24:00:00Z", False),
        ("time", "12:00:00", False),
        ("date-time", "2024-12-31T00:00:00.5+01:00", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2023-04-31T00:00:00Z", False),
    ],
)
def test_known_cases(name: str, text: str, allowed: bool) -> None:
    assert bool(re.search(times_as_patterns({"format": name})["pattern"], text)) is allowed


def test_only_formats_change() -> None:
    schema = {
        "properties": {"format": {"type": "string", "format": "time"}, "when": {"anyOf": [{"format": "date-time"}]}},
        "const": {"format": "time"},
        "enum": [{"format": "time"}],
        "items": {"format": "time", "pattern": "^1"},
        "format": "date",
    }
    found = times_as_patterns(schema)
    assert set(found["properties"]["format"]) == {"type", "pattern"}
    assert set(found["properties"]["when"]["anyOf"][0]) == {"pattern"}
    for untouched in ("const", "enum", "items", "format"):
        assert found[untouched] == schema[untouched]
