"""Reader of tool calls written as a Python list of calls with keyword arguments.

Each call is passed on once it is whole, for Python's literals become JSON's only then.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

from slipring.http.json_calls import read_name
from slipring.http.text_source import Reader, TextSource
from slipring.http.tool_calls import CallReader, NotACall

_PLAIN = re.compile(r"[^()\[\]{}'\"]*")
_QUOTED = {"'": re.compile(r"[^'\\\n]*"), '"': re.compile(r'[^"\\\n]*')}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_MOST_NESTED = 64


@dataclass(frozen=True)
class PythonCalls:
    """`[f(a=1), g()]`; by its beginning alone only where the functions are known tools."""

    name: str
    markers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ("[",)
    special: bool = False

    def read(self, calls: CallReader, marker: str) -> Reader[None]:
        source = calls.source
        if (yield from source.next_token()) != "[":
            raise NotACall
        separator = "["
        while (yield from source.next_token()) == separator:
            source.position += 1
            yield from self._read_call(calls, bool(marker))
            separator = ","
        if source.here() != "]":
            raise NotACall
        source.position += 1
        yield from source.closer(self.closers)

    def _read_call(self, calls: CallReader, announced: bool) -> Reader[None]:
        source = calls.source
        yield from source.next_token()
        name = yield from read_name(source)
        if source.here() != "(" or not (announced or name in calls.schemas):
            raise NotACall
        arguments = _arguments((yield from _read_bracketed(source)))
        calls.start(name)
        calls.write(arguments)
        calls.end()


def _read_bracketed(source: TextSource) -> Reader[str]:
    """From an opening bracket to the one that closes it."""
    pieces: list[str] = []
    closers: list[str] = []
    while True:
        pieces.append((yield from source.span(_PLAIN)))
        character = source.here()
        if character in _QUOTED:
            yield from _read_quoted(source, pieces)
            continue
        source.position += 1
        pieces.append(character)
        if character in _CLOSERS and len(closers) < _MOST_NESTED:
            closers.append(_CLOSERS[character])
        elif not closers or character != closers.pop():
            raise NotACall
        if not closers:
            return "".join(pieces)


def _read_quoted(source: TextSource, pieces: list[str]) -> Reader[None]:
    quote = source.here()
    source.position += 1
    pieces.append(quote)
    while True:
        pieces.append((yield from source.span(_QUOTED[quote])))
        # A backslash and what it escapes, or the closing quote. Raw line ends are put right.
        character = source.here()
        size = 2 if character == "\\" else 1
        taken = yield from source.ahead(size)
        if len(taken) < size:
            raise NotACall
        source.position += size
        pieces.append("\\n" if taken == "\n" else taken)
        if taken == quote:
            return


def _arguments(text: str) -> str:
    """`(a=1, b="x")` as a JSON object. Raises NotACall."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotACall
        found = {_keyword(keyword): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return json.dumps(found, ensure_ascii=False, allow_nan=False, default=_refuse)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise NotACall from None


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise NotACall
    return keyword.arg


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is no JSON")
