"""Which grammars have an end."""

from __future__ import annotations

import pytest

from slipring.runtime.lark_rules import can_end


@pytest.mark.parametrize(
    "text",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "a" (start ",")* "b"',
        'start: "a" [start]',
        'start: "a" start{0,3}',
        'start: "a" start~0..2 "b"',
        'start: | "a" start',
        'start: item+\nitem[lazy]: "x: y" // start: never\n    | /[a-z]+:/i item',
        'start: "a" other\n# start: start\nother: <|im_end|> %json {"a": {"b: }": 1}} -> name\n\n',
        '%llguidance {"no_forcing": true}\nstart: TEXT\nTEXT: "a".."z"',
        "start: unknown",
        'start: "a" start $',
        'start: "never closed',
        'start: "a" (start',
    ],
)
def test_what_ends_or_is_not_understood(text: str) -> None:
    assert can_end(text)


@pytest.mark.parametrize(
    "text",
    [
        "start: start",
        'start: "a" start',
        'start: "a" start | "b" other\nother: "c" start',
        'start: ("a" | "b") start+',
        'start: "a" start{1,3}',
        'start: "x" other?  other\nother: "(" other ")"',
        '%llguidance {}\n\nstart: "a" start\n     | other\n\nother: %json {} other\n',
    ],
)
def test_what_never_ends(text: str) -> None:
    assert not can_end(text)


@pytest.mark.parametrize("order", [1, -1])
def test_many_rules_are_looked_at_once_each(order: int) -> None:
    """A chain through 3,000 rules beside 20,000 others: by rounds over all of them this took minutes."""
    chain = [f"a{i}: a{i + 1}" for i in range(3000)][::order]
    others = [f"b{i}: a0" for i in range(20_000)]
    assert can_end("\n".join(["start: a0", *chain, *others, 'a3000: "x"']))
    assert not can_end("\n".join(["start: a0", *chain, *others, "a3000: a0"]))
