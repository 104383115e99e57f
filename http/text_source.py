"""`TextSource`: text that arrives in pieces, read by generators that pause wherever it runs out.

A reader is a generator: it `yield`s when it needs more, and is resumed once more has come or the end is known. What
it decides depends on the text alone and never on where the pieces were cut, because every primitive here waits until
it has seen all that it compares. Text is consumed as it is read, so that what waits in the window stays short (at
most a marker or an escape) and reading is linear in the text.

While a `mark` is set, what has been consumed since can be taken back: an attempt that turns out to be something else
loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
"""Yields to wait for text; returns its result."""

_SPACE = re.compile(r"[ \t\r\n]*")


class TextSource:
    __slots__ = ("_begin", "_marked", "_recorded", "closed", "position", "window")

    def __init__(self) -> None:
        self.window = ""
        self.position = 0
        """In `window`: everything before it is consumed."""
        self.closed = False
        """No more text will come."""
        self._marked = False
        self._recorded: list[str] = []
        self._begin = 0

    def push(self, text: str) -> None:
        if self._marked:
            self._recorded.append(self.window[self._begin : self.position])
        self.window = self.window[self.position :] + text
        self.position = self._begin = 0

    def mark(self) -> None:
        """Remember what is consumed from here on."""
        self._marked = True
        self._recorded = []
        self._begin = self.position

    def unmark(self) -> None:
        self._marked = False
        self._recorded = []

    def take_back(self) -> str:
        """What was consumed since the mark, which ends here."""
        text = "".join(self._recorded) + self.window[self._begin : self.position]
        self.unmark()
        return text

    # Primitives that do not wait.

    def here(self) -> str:
        """The next character; empty when the window is."""
        return self.window[self.position : self.position + 1]

    def match(self, pattern: re.Pattern[str]) -> str:
        """Consume what `pattern` matches in the window. For patterns that may stop anywhere, such as `[a-z]*`."""
        found = pattern.match(self.window, self.position)
        if found is None:
            return ""
        self.position = found.end()
        return found.group()

    # Primitives that wait.

    def more(self) -> Reader[bool]:
        """Wait for a character. False: the text has ended."""
        while self.position >= len(self.window):
            if self.closed:
                return False
            yield
        return True

    def ahead(self, count: int) -> Reader[str]:
        """The next `count` characters without consuming them; fewer at the end of the text."""
        while len(self.window) - self.position < count and not self.closed:
            yield
        return self.window[self.position : self.position + count]

    def next_token(self) -> Reader[str]:
        """Skip white space; the character that follows, not consumed (empty at the end)."""
        while True:
            self.match(_SPACE)
            if self.position < len(self.window):
                return self.window[self.position]
            if self.closed:
                return ""
            yield

    def span(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Consume all that a pattern of single characters (`[...]*`) matches, over all pieces."""
        found = []
        while True:
            found.append(self.match(pattern))
            if self.position < len(self.window) or self.closed:
                return "".join(found)
            yield

    def literal(self, text: str) -> Reader[bool]:
        """Consume `text` if it follows; else nothing."""
        while True:
            follows = self.window[self.position : self.position + len(text)]
            if follows == text:
                self.position += len(text)
                return True
            if self.closed or not text.startswith(follows):
                return False
            yield

    def closer(self, texts: tuple[str, ...]) -> Reader[None]:
        """Skip white space and the first of `texts` that follows, if one does, even if the end of the text cuts it."""
        yield from self.next_token()
        for text in texts:
            if (yield from self.literal(text)):
                return
            if self.closed and text.startswith(self.window[self.position : self.position + len(text)]):
                self.position = len(self.window)
                return


class Markers:
    """Finds the first of several marker texts, holding back only what may still become one."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        """Where several match at one place the longest wins."""
        self.texts = tuple(sorted(set(markers), key=len, reverse=True))
        self._longest = max(map(len, self.texts), default=0)
        self._whole = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None
        prefixes = {text[:size] for text in self.texts for size in range(1, len(text))}
        ordered = sorted(prefixes, key=len, reverse=True)
        self._partial = re.compile("(?:" + "|".join(map(re.escape, ordered)) + r")\Z") if ordered else None

    def next(self, source: TextSource) -> tuple[str, str | None]:
        """Consume text up to the first marker and the marker: (text, marker). None: there is none in the window yet;
        then what may become one is left."""
        window, begin = source.window, source.position
        found = self._whole.search(window, begin) if self._whole else None
        end = len(window) if found is None else found.start()
        tail = None
        if self._partial is not None and not source.closed:
            tail = self._partial.search(window, max(begin, len(window) - self._longest))
        if tail is not None and (found is None or tail.start() <= found.start()):
            # A longer marker may begin where, or before, a shorter one was found.
            source.position = tail.start()
            return window[begin : tail.start()], None
        source.position = end if found is None else found.end()
        return window[begin:end], None if found is None else found.group()
