"""From sampled ids to the text that may be sent now. Owns the two reasons to hold text back, and nothing else.

1. UTF-8 that is not complete yet: its bytes wait for the next token.
2. Text that may become a stop string: only the longest suffix that is a proper prefix of some stop string waits.

Invariant: the pieces joined are `tokenizer.decode(ids, continuation=True)` cut at the first stop string, and no piece
ever holds a character of that stop string (unless it is to be included). The first stop string is the one that is
completed earliest; of several completed by the same character the longest, so the order of the list never matters.

Cost is linear in the text, whatever the stop strings are: an Aho-Corasick automaton (Aho & Corasick, CACM 18(6), 1975)
follows them all at once, and held text is never stored, for it always equals the beginning of a stop string.
A stop string counts only in text that comes after the first `min_tokens` tokens, as in vLLM.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence

from slipring.runtime.tokenizer import Tokenizer

_CHARACTER_BITS = 21  # Unicode ends at 0x10FFFF


class Detokenizer:
    """One completion's stream of text."""

    __slots__ = ("_include_stop", "_matcher", "_num_exempt", "_pending", "_table", "stopped", "tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Text of the first `min_tokens` tokens is never searched. Raises ValueError if a stop string is empty."""
        self.stopped: str | None = None
        """The stop string that ended the text; what comes after it is dropped."""
        self.tokenizer = tokenizer
        self._table = tokenizer.byte_table(skip_special_tokens)
        self._pending = b""
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._num_exempt = min_tokens

    def push(self, token_id: int) -> str:
        """The text that is safe to send now that `token_id` was sampled; empty when all of it must wait."""
        data = self._table[token_id]
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._matcher is None:
            return text
        if self._num_exempt > 0:
            self._num_exempt -= 1
            return text
        return self._match(text)

    def finish(self) -> str:
        """What was held back, when no token will follow. May itself complete a stop string (one with U+FFFD)."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        if self._matcher is None or self.stopped is not None:
            return "" if self.stopped is not None else text
        return self._match(text) + ("" if self.stopped is not None else self._matcher.flush())

    def _match(self, text: str) -> str:
        if self.stopped is not None or self._matcher is None:
            return ""
        piece, self.stopped = self._matcher.feed(text)
        return piece + self.stopped if self.stopped is not None and self._include_stop else piece


class _StopMatcher:
    """The automaton. A node is a prefix of some stop string; node 0 is the empty one.

    At any time the held text is exactly the prefix that `node` stands for: `stop[owner[node]][:depth[node]]`.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self.stop = stop
        self.next: dict[int, int] = {}
        """(node, character) packed into one int: the node one character deeper."""
        self.depth = [0]
        self.owner = [0]
        self.fallback = [0]
        """Node of the longest proper suffix that is itself a prefix of a stop string."""
        self.ending: list[int] = [-1]
        """Index of the longest stop string that ends here, or -1."""
        self.node = 0
        self.first = re.compile("[" + re.escape("".join({text[0] for text in stop})) + "]")
        for index in range(len(stop)):
            self._insert(index)
        self._link()

    def _insert(self, index: int) -> None:
        node = 0
        for character in self.stop[index]:
            key = node << _CHARACTER_BITS | ord(character)
            child = self.next.get(key)
            if child is None:
                child = self.next[key] = len(self.depth)
                self.depth.append(self.depth[node] + 1)
                self.owner.append(index)
                self.fallback.append(0)
                self.ending.append(-1)
            node = child
        self.ending[node] = index

    def _link(self) -> None:
        """Breadth first, so that every fallback (which is shorter) is final before it is used."""
        children: list[list[tuple[int, int]]] = [[] for _ in self.depth]
        mask = (1 << _CHARACTER_BITS) - 1
        for key, child in self.next.items():
            children[key >> _CHARACTER_BITS].append((key & mask, child))
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for character, child in children[node]:
                queue.append(child)
                if node:
                    self.fallback[child] = self._step(self.fallback[node], character)
                if self.ending[child] < 0:
                    self.ending[child] = self.ending[self.fallback[child]]

    def _step(self, node: int, character: int) -> int:
        following = self.next.get(node << _CHARACTER_BITS | character)
        while following is None and node:
            node = self.fallback[node]
            following = self.next.get(node << _CHARACTER_BITS | character)
        return following or 0

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that can no longer be part of a match, and the stop string that was completed (then it is final)."""
        out: list[str] = []
        position, size, node = 0, len(text), self.node
        while position < size:
            if node == 0:
                found = self.first.search(text, position)
                if found is None:
                    out.append(text[position:])
                    break
                out.append(text[position : found.start()])
                position = found.start()
            character = text[position]
            position += 1
            held, node = node, self._step(node, ord(character))
            released = self.depth[held] + 1 - self.depth[node]
            if released:
                out.append((self._prefix(held, released) + character)[:released])
            if self.ending[node] >= 0:
                match = self.stop[self.ending[node]]
                out.append(self._prefix(node, self.depth[node] - len(match)))
                self.node = 0
                return "".join(out), match
        self.node = node
        return "".join(out), None

    def _prefix(self, node: int, length: int) -> str:
        return self.stop[self.owner[node]][: min(length, self.depth[node])]

    def flush(self) -> str:
        node, self.node = self.node, 0
        return self._prefix(node, self.depth[node])
