"""Where a text's last few tokens have stood before: an index over many texts that grows by one entry with each token.

It maps the hash of each n-gram of one size to the latest place right after it, and each place to the one before it,
so it is never rescanned. A place is the number of its text and an offset in it. Texts are forgotten as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_STRIDE = 1 << 32
"""Longest text, in tokens."""
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Occurrence:
    text: list[int]
    """Whole, and still growing perhaps."""
    at: int
    """What follows the tokens that were looked up begins here."""
    length: int
    """Tokens before `at` that equal those looked up."""


@dataclass(slots=True)
class _Text:
    tokens: list[int] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    """For each place that was entered, the one before it that follows the same n-gram."""


class Occurrences:
    def __init__(self, size: int) -> None:
        """`size`: tokens of an n-gram; fewer are never found."""
        self._size = size
        self._texts: dict[int, _Text] = {}
        self._latest: dict[int, int] = {}
        self._next = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._texts)

    def begin(self, tokens: Iterable[int] = ()) -> int:
        """A new text; returns its number."""
        number = self._next
        self._next += 1
        self._texts[number] = _Text()
        self.extend(number, tokens)
        return number

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """The text goes on. It is found by `find` only up to where `enter` has come. Nothing, once it was forgotten."""
        if (text := self._texts.get(number)) is not None:
            before = len(text.tokens)
            text.tokens += tokens
            self.num_tokens += len(text.tokens) - before

    def tokens(self, number: int) -> list[int]:
        return self._texts[number].tokens

    def enter(self, number: int, most: int) -> bool:
        """Enter the next `most` tokens of a text; whether all of it is entered now."""
        if (text := self._texts.get(number)) is None:
            return True
        tokens, earlier, latest, size = text.tokens, text.earlier, self._latest, self._size
        begin, end = len(earlier), min(len(tokens), len(earlier) + most)
        for at in range(begin, end):
            if at < size:
                earlier.append(_NOWHERE)
                continue
            gram = hash(tuple(tokens[at - size : at]))
            earlier.append(latest.get(gram, _NOWHERE))
            latest[gram] = number * _STRIDE + at
        return end == len(tokens)

    def find(self, tokens: list[int], most_tokens: int, most: int, besides: int | None = None) -> Iterator[Occurrence]:
        """The latest `most` places where the end of `tokens` stood, compared up to `most_tokens`, the latest first;
        none in the text `besides`."""
        if len(tokens) < self._size:
            return
        at = self._latest.get(hash(tuple(tokens[-self._size :])), _NOWHERE)
        end = tokens[-most_tokens:]
        for _ in range(most):
            if at == _NOWHERE:
                return
            number, offset = divmod(at, _STRIDE)
            if (text := self._texts.get(number)) is None:
                return  # forgotten, and with it the way to what came before
            if number != besides:
                length = _agreement(text.tokens, offset, end)
                if length >= self._size:  # else another n-gram of the same hash
                    yield Occurrence(text.tokens, offset, length)
            at = text.earlier[offset]

    def forget_oldest(self) -> None:
        number = next(iter(self._texts))
        text = self._texts.pop(number)
        self.num_tokens -= len(text.tokens)
        for at in range(self._size, len(text.earlier)):
            gram = hash(tuple(text.tokens[at - self._size : at]))
            if self._latest.get(gram, _NOWHERE) // _STRIDE == number:
                del self._latest[gram]


def _agreement(text: list[int], at: int, end: list[int]) -> int:
    """How many tokens before `at` equal the last ones of `end`."""
    length, most = 0, min(at, len(end))
    if text[at - most : at] == end[len(end) - most :]:
        return most
    while text[at - length - 1] == end[-length - 1]:
        length += 1
    return length
