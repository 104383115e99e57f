"""Whether anything finite can match a grammar in llguidance's Lark dialect: `start: "a" start` never ends.

llguidance itself does not ask: it follows such a grammar until a limit stops it. A rule ends if one of its alternatives
does, and an alternative if all that it needs does; the least fixed point of that is the answer. Text that is not
understood here counts as something that ends: to judge it is llguidance's part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|\#[^\n]*)|(?P<line>\n)
    |(?P<leaf>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>)
    |(?P<name>[?!]?[A-Za-z_][\w-]*)|(?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    |(?P<block>%\w+)|(?P<mark>->|\.\.|[:|()\[\]?*+,=.\d])""",
    re.VERBOSE,
)
_BLOCK_PART = re.compile(r'"(?:\\.|[^"\\])*"|[{}]|[^"{}]+', re.DOTALL)
_LOOK_S = 1.0
_EMBEDDED = ("%json", "%regex", "%lark")

Needs = list[object]
"""What an alternative needs: names of rules (str) and groups (list[Needs])."""
_Token = tuple[str, str]


def can_end(text: str) -> bool:
    """Whether `start` can, as far as the text is understood."""
    try:
        rules = dict(_Parser(list(_tokens(text))).rules())
    except (ValueError, IndexError, RecursionError):
        return True
    ending = _ending(rules, time.monotonic() + _LOOK_S)
    return ending is None or "start" not in rules or "start" in ending


def _ending(rules: dict[str, list[Needs]], until: float) -> set[str] | None:
    """Rules that can end; None when that took too long. Each is looked at again when one that it names has been found
    to."""
    users: dict[str, list[str]] = {}
    for name, ways in rules.items():
        for needed in set(_names(ways)):
            users.setdefault(needed, []).append(name)
    ending, waiting = set[str](), list(rules)
    while waiting:
        if time.monotonic() > until:
            return None
        name = waiting.pop()
        if name not in ending and _ends(rules[name], ending, rules):
            ending.add(name)
            waiting += users.get(name, ())
    return ending


def _names(ways: list[Needs]) -> Iterator[str]:
    for way in ways:
        for need in way:
            if isinstance(need, list):
                yield from _names(need)
            elif isinstance(need, str):
                yield need


def _ends(ways: list[Needs], ending: set[str], rules: dict[str, list[Needs]]) -> bool:
    return any(
        all(
            _ends(need, ending, rules) if isinstance(need, list) else need in ending or need not in rules
            for need in way
        )
        for way in ways
    )


def _tokens(text: str) -> Iterator[_Token]:
    """Raises ValueError at what it does not know."""
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"not understood at {position}")
        kind, position = found.lastgroup or "", found.end()
        if kind == "block":
            position = _behind_block(text, position)
            kind = "leaf" if found.group() in _EMBEDDED else "directive"
        if kind != "skip":
            yield kind, found.group()


def _behind_block(text: str, position: int) -> int:
    """Behind the braces that follow, or where none do, at the position itself."""
    begin, depth = position, 0
    while begin < len(text) and text[begin] in " \t":
        begin += 1
    if text[begin : begin + 1] != "{":
        return position
    for part in _BLOCK_PART.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(part.group(), 0)
        if depth == 0:
            return part.end()
    raise ValueError("a block without an end")


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = [*tokens, ("line", "\n"), ("end", "")]
        self._at = 0

    def rules(self) -> Iterator[tuple[str, list[Needs]]]:
        """Each rule's name and alternatives. Raises ValueError or IndexError."""
        while (kind := self._here()[0]) != "end":
            if kind == "directive":
                while self._here()[0] != "line":
                    self._at += 1
            elif kind == "name":
                name = self._take().lstrip("?!")
                while self._here()[1] != ":":  # attributes, a priority
                    if self._here()[0] in ("line", "end"):
                        raise ValueError("a name that no rule follows")
                    self._at += 1
                self._at += 1
                yield name, self._ways(None)
            elif kind == "line":
                self._at += 1
            else:
                raise ValueError(f"not understood: {self._here()[1]}")

    def _here(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _ways(self, closer: str | None) -> list[Needs]:
        """Alternatives up to `closer`, or to the end of a rule."""
        ways: list[Needs] = [[]]
        while True:
            kind, text = self._here()
            if closer is not None and text == closer:
                self._at += 1
                return ways
            if kind == "line":
                at = self._at
                while self._here()[0] == "line":
                    self._at += 1
                if closer is None and self._here()[1] != "|":
                    self._at = at
                    return ways
            elif text == "|":
                self._at += 1
                ways.append([])
            elif text == "->":
                self._at += 2
            else:
                ways[-1] += self._item()

    def _item(self) -> Needs:
        """What the next item needs; nothing where it may be left out."""
        kind, text = self._tokens[self._at]
        self._at += 1
        needs: Needs
        if kind == "leaf":
            needs = []
        elif kind == "name":
            needs = [text]
        elif text == "(":
            needs = [self._ways(")")]
        elif text == "[":
            self._ways("]")
            needs = []
        elif text == "..":  # a range of letters
            self._at += 1
            needs = []
        else:
            raise ValueError(f"not understood: {text}")
        kind, text = self._here()
        if text in ("?", "*", "+") or kind == "times":
            self._at += 1
            least = re.search(r"\d+|,", text)
            if text in ("?", "*") or (least is not None and least.group() in (",", "0")):
                return []
        return needs
