"""`RowEdits`: what single rows do to their logits before a draw. Logit bias, and masks: allowed ids, bad words,
min_tokens.

Loaded at admission, from the table alone. A bad word is a token sequence whose last token must not follow the others;
so rows with bad words of several tokens keep the tail of their output, as a tensor where the logits are: it moves on
as tokens are drawn and never waits for the engine, and a readmitted row gets it back from the outputs in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.shm.table import WORD_END, BatchTable

IntArray = NDArray[np.int64]
Upload = Callable[[NDArray[Any]], Tensor]
"""A tensor of the array, where the logits are."""

_ANY = -1
"""In a pattern: matches every token, and nothing."""
_NOTHING = -2
"""In a tail: no token was drawn here yet."""


@dataclass(slots=True)
class _Words:
    """Bad words of several tokens."""

    patterns: Tensor
    """[n, longest]: what comes before the last token, to the right; `_ANY` in front of it."""
    last: Tensor
    """[n]"""
    tail: Tensor
    """[longest]: the output's last tokens, `_NOTHING` in front of them."""


@dataclass(frozen=True, slots=True)
class _Edit:
    bias: tuple[Tensor, Tensor] | None
    """(ids, values)"""
    allowed: Tensor | None
    banned: Tensor | None
    """Bad words of one token."""
    words: _Words | None
    stop_ids: Tensor | None
    """Not to be drawn before `min_tokens` are out."""
    min_tokens: int

    @property
    def is_empty(self) -> bool:
        return all(part is None for part in (self.bias, self.allowed, self.banned, self.words, self.stop_ids))


class RowEdits:
    """Invariant: `edited[row]` exactly for rows whose present admission edits anything."""

    def __init__(self, table: BatchTable, upload: Upload) -> None:
        self.edited: NDArray[np.bool_] = np.zeros(table.shape.num_rows, bool)
        self._table = table
        self._upload = upload
        self._edits: dict[int, _Edit] = {}

    def admit(self, row: int) -> None:
        """Forget the row's last admission and load what this one asks for."""
        edit = self._load(row)
        self._edits.pop(row, None)
        if not edit.is_empty:
            self._edits[row] = edit
        self.edited[row] = not edit.is_empty

    def apply(self, scores: Tensor, rows: IntArray, num_outputs: IntArray) -> bool:
        """In place; scores [S, V] float32 of rows [S], num_outputs [S]. Whether any of them edits."""
        at = np.flatnonzero(self.edited[rows])
        for i in at.tolist():
            self._apply(self._edits[int(rows[i])], scores[i], int(num_outputs[i]))
        return len(at) > 0

    def count(self, rows: IntArray, tokens: Tensor) -> None:
        """tokens [S] int64 were drawn for rows [S]; those of one row in order."""
        for i in np.flatnonzero(self.edited[rows]).tolist():
            if (words := self._edits[int(rows[i])].words) is not None:
                words.tail = torch.cat((words.tail[1:], tokens[i : i + 1]))

    def _load(self, row: int) -> _Edit:
        table = self._table
        bias = allowed = stop_ids = None
        if count := int(table.num_bias[row]):
            ids = self._upload(table.bias_ids[row, :count].astype(np.int64))
            bias = (ids, self._upload(table.bias_values[row, :count].copy()))
        if count := int(table.num_allowed[row]):
            allowed = self._upload(table.allowed_ids[row, :count].astype(np.int64))
        min_tokens = int(table.min_tokens[row])
        # A grammar's mask sees to min_tokens itself, since it knows where nothing but an end can follow.
        if min_tokens > 0 and not table.grammar[row] and (count := int(table.num_stop_ids[row])):
            stop_ids = self._upload(table.stop_ids[row, :count].astype(np.int64))
        words = _split(table.bad_words[row, : table.num_bad_words[row]])
        singles = [word[0] for word in words if len(word) == 1]
        banned = self._upload(np.array(singles, np.int64)) if singles else None
        return _Edit(bias, allowed, banned, self._words(row, [w for w in words if len(w) > 1]), stop_ids, min_tokens)

    def _words(self, row: int, words: list[list[int]]) -> _Words | None:
        if not words:
            return None
        longest = max(map(len, words)) - 1
        patterns = np.full((len(words), longest), _ANY, np.int64)
        for pattern, word in zip(patterns, words, strict=True):
            pattern[longest - len(word) + 1 :] = word[:-1]
        outputs = self._table.token_ids[row, self._table.num_prompt[row] : self._table.num_known[row]][-longest:]
        tail = np.full(longest, _NOTHING, np.int64)
        tail[longest - len(outputs) :] = outputs
        last = np.array([word[-1] for word in words], np.int64)
        return _Words(self._upload(patterns), self._upload(last), self._upload(tail))

    @staticmethod
    def _apply(edit: _Edit, scores: Tensor, num_outputs: int) -> None:
        if edit.bias is not None:
            scores.index_add_(0, *edit.bias)
        if edit.allowed is not None:
            kept = scores.index_select(0, edit.allowed)
            scores.fill_(float("-inf")).index_copy_(0, edit.allowed, kept)
        if edit.banned is not None:
            scores.index_fill_(0, edit.banned, float("-inf"))
        if (words := edit.words) is not None:
            met = ((words.patterns == words.tail) | (words.patterns == _ANY)).all(1)
            scores.index_add_(0, words.last, torch.zeros_like(met, dtype=scores.dtype).masked_fill(met, float("-inf")))
        if edit.stop_ids is not None and num_outputs < edit.min_tokens:
            scores.index_fill_(0, edit.stop_ids, float("-inf"))


def _split(column: NDArray[np.int32]) -> list[list[int]]:
    """The `bad_words` column as token sequences."""
    words: list[list[int]] = [[]]
    for token in column.tolist():
        if token == WORD_END:
            words.append([])
        else:
            words[-1].append(token)
    return words[:-1]
