"""Special tokens that somebody writes in a message stay text: nobody can forge the end of a turn by writing it.

A template's own special tokens and those in the text it is given look the same once it has printed them. So those in
the given text are hidden before (`hide`) and put back behind it as text that is cut inside each of them (`parts`): the
parts are tokenized one by one, and no part holds a written marker whole. Text without markers is one part, the same as
ever, so that its ids are the same as ever. (A SentencePiece vocabulary may put a space where a part begins.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_STAND_IN = "\U0010fffd"
"""A private character, for which there is no other use. Where somebody writes it, it is hidden like a marker."""
_HIDDEN = re.compile(f"{_STAND_IN}([0-9]+){_STAND_IN}")


class WrittenMarkers:
    """Knows one model's special tokens."""

    def __init__(self, markers: Iterable[str]) -> None:
        texts = sorted({text for text in markers if len(text) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, [*texts, _STAND_IN])))

    def hide(self, value: Any, found: list[str]) -> Any:
        """`value` (JSON's types) with every marker in it replaced; what was replaced is added to `found`."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _stand_in(match.group(), found), value)
        if isinstance(value, dict):
            return {self.hide(key, found): self.hide(item, found) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, found) for item in value]
        return value


def _stand_in(text: str, found: list[str]) -> str:
    found.append(text)
    return f"{_STAND_IN}{len(found) - 1}{_STAND_IN}"


def parts(text: str, found: list[str]) -> list[str]:
    """`text` with what was hidden put back, cut behind the first character of each marker. Joined it is the text."""
    if not found:
        return [text]
    cut, current = [], ""
    pieces = _HIDDEN.split(text)
    for position, piece in enumerate(pieces):
        if position % 2 == 0:
            current += piece
            continue
        marker = found[int(piece)]
        cut.append(current + marker[0])
        current = marker[1:]
    return [*cut, current]
