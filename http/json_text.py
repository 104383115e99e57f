"""Reads one JSON value from a `TextSource` and passes its text on while it comes, in one normal form.

Models write JSON nearly right. What can be put right without guessing is: white space becomes that of Python's
`json.dumps`, raw control characters in strings are escaped, a backslash that begins no escape is taken literally, half
a surrogate pair is U+FFFD, a comma before a closing bracket is dropped, True, False and None are JSON's words. Anything
else is `Malformed`; what was consumed but not passed on yet is passed on raw before it is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from slipring.http.text_source import Reader, TextSource

Write = Callable[[str], object]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[A-Za-z0-9.+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_HEX = re.compile(r"[0-9A-Fa-f]{4}\Z")
_HEX_BEGINS = re.compile(r"[0-9A-Fa-f]{0,3}\Z")
_WORDS = {word: word for word in ("true", "false", "null")} | {"True": "true", "False": "false", "None": "null"}
_CONTROL = {chr(code): f"\\u{code:04x}" for code in range(32)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_REPLACEMENT = "\\ufffd"


class Malformed(Exception):
    """Not JSON, or the text ended inside it."""


def read_value(source: TextSource, write: Write) -> Reader[None]:
    """Read a value of any depth (no recursion)."""
    closers: list[str] = []
    while True:
        yield from _read_item(source, write, closers)
        while closers and (yield from _closes(source, write, closers[-1])):
            closers.pop()
        if not closers:
            return


def _read_item(source: TextSource, write: Write, closers: list[str]) -> Reader[None]:
    """An item with what introduces it, up to a scalar's end or behind a bracket that opens (a closer is added)."""
    while True:
        if closers and closers[-1] == "}":
            yield from _read_key(source, write)
        character = yield from source.next_token()
        if character == '"':
            return (yield from read_string(source, write))
        if character not in ("{", "["):
            return (yield from _read_word(source, write))
        source.position += 1
        write(character)
        closers.append("}" if character == "{" else "]")
        if (yield from source.next_token()) == closers[-1]:
            return


def _closes(source: TextSource, write: Write, closer: str) -> Reader[bool]:
    """What follows an item: the closing bracket (True), or a comma and another item."""
    character = yield from source.next_token()
    if character == ",":
        source.position += 1
        character = yield from source.next_token()
        if character != closer:
            write(", ")
            return False
    if character != closer:
        raise Malformed
    source.position += 1
    write(closer)
    return True


def _read_key(source: TextSource, write: Write) -> Reader[None]:
    if (yield from source.next_token()) != '"':
        raise Malformed
    yield from read_string(source, write)
    yield from expect(source, ":")
    write(": ")


def expect(source: TextSource, character: str) -> Reader[None]:
    if (yield from source.next_token()) != character:
        raise Malformed
    source.position += 1


def _read_word(source: TextSource, write: Write) -> Reader[None]:
    """A number, or true, false, null."""
    word = yield from source.span(_WORD)
    known = _WORDS.get(word, word if _NUMBER.match(word) else None)
    write(word if known is None else known)
    if known is None:
        raise Malformed


def read_string(source: TextSource, write: Write) -> Reader[None]:
    """From the opening quote to the closing one."""
    source.position += 1
    write('"')
    while True:
        if text := source.match(_PLAIN):
            write(text)
        if not (yield from source.more()):
            raise Malformed
        character = source.here()
        if character == '"':
            source.position += 1
            write('"')
            return
        if character == "\\":
            yield from _read_escape(source, write)
        elif control := _CONTROL.get(character):
            source.position += 1
            write(control)


def _read_escape(source: TextSource, write: Write) -> Reader[None]:
    pair = yield from source.ahead(2)
    if len(pair) < 2:
        source.position += 1
        write(pair)
        raise Malformed
    if pair == "\\u":
        yield from _read_unicode(source, write)
    elif pair[1] in '"\\/bfnrt':
        source.position += 2
        write(pair)
    else:
        source.position += 1
        write("\\\\")


def _read_unicode(source: TextSource, write: Write) -> Reader[None]:
    escape = yield from source.ahead(6)
    if not _HEX.match(escape, 2):
        cut = len(escape) < 6 and _HEX_BEGINS.match(escape, 2) is not None
        source.position += len(escape) if cut else 1
        write(escape if cut else "\\\\")
        if cut:
            raise Malformed
        return
    if not 0xD800 <= int(escape[2:], 16) < 0xE000:
        source.position += 6
        write(escape)
        return
    both = (yield from source.ahead(12)) if int(escape[2:], 16) < 0xDC00 else escape
    paired = both[6:8] == "\\u" and _HEX.match(both, 8) and 0xDC00 <= int(both[8:], 16) < 0xE000
    source.position += 12 if paired else 6
    write(both if paired else _REPLACEMENT)


def normal_value(text: str) -> str | None:
    """A JSON value's text in the normal form; None if it is none."""
    source, pieces = TextSource(), list[str]()
    source.push(text)
    source.closed = True
    try:
        for _ in read_value(source, pieces.append):  # all the text is there: it never waits
            pass
    except Malformed:
        return None
    return None if source.window[source.position :].strip() else "".join(pieces)


def normal_object(text: str) -> str | None:
    """As `normal_value`, for objects only."""
    return normal_value(text) if text.lstrip().startswith("{") else None
