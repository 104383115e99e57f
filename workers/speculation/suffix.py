"""Suffix decoding (Oliaro et al. 2024): the end of a row's text has stood before, in the row itself or in what this
worker has lately written for anybody, and what followed it most often is the draft.

Outputs are entered as they are drawn, so a row learns from those beside it. A longer match is trusted further: with
the factor f, m matching tokens allow f * m drafts, and matches and drafts together are at most the depth (vLLM's and
Arctic Inference's rules). Only the latest few occurrences of an end are counted. The oldest outputs are forgotten
beyond a number of requests, and beyond `MOST_TOKENS`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.ngram import SLICE, copied
from slipring.workers.speculation.occurrences import Occurrence, Occurrences
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer

MOST_TOKENS = 1 << 18
"""Tokens of outputs that are remembered, at about 200 bytes each."""
_SIZE = 3
"""Tokens that must match at least. A CPU's step costs by its tokens, and fewer would seldom be right."""
_CANDIDATES = 16
"""Latest occurrences that are counted."""


@dataclass(frozen=True, slots=True)
class Limits:
    depth: int
    """Matching tokens and drafts together."""
    factor: float
    """Drafts for each matching token."""
    least_chance: float
    """Share of the counted occurrences that a draft must still have."""

    def drafts(self) -> list[int]:
        """[depth + 1]: drafts after a match of so many tokens, or of its last few, if those allow more."""
        allowed = [int(min(self.factor * length, self.depth - length)) for length in range(self.depth + 1)]
        return [max(allowed[: length + 1]) for length in range(self.depth + 1)]


class SuffixProposer(NullProposer):
    """An index of each row's own text, and one of the outputs of all."""

    def __init__(self, num_rows: int, limits: Limits, max_outputs: int) -> None:
        self._limits, self._max_outputs = limits, max_outputs
        self._allowed = limits.drafts()
        self._size = max(1, min(_SIZE, limits.depth - 1))
        self._own: list[Occurrences | None] = [None] * num_rows
        self._outputs = Occurrences(self._size)
        self._number = [-1] * num_rows
        """Of each row's output among `_outputs`."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        tokens, outputs = token_ids.tolist(), self._outputs
        self._own[row] = own = Occurrences(self._size)
        own.begin(tokens)
        if self._max_outputs:
            # The prompt's end tells where an output begins. More of the prompt stays the row's own.
            self._number[row] = outputs.begin(tokens[-self._size :])
            while len(outputs) > self._max_outputs:
                outputs.forget_oldest()

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        outputs = self._outputs
        for row, drawn, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            if (own := self._own[row]) is None:
                continue
            own.extend(0, drawn[:count])
            if self._max_outputs:
                outputs.extend(self._number[row], drawn[:count])
                outputs.enter(self._number[row], count + self._size)
        while outputs.num_tokens > MOST_TOKENS and len(outputs) > 1:
            outputs.forget_oldest()

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            if count > 0 and (own := self._own[row]) is not None:
                found = self._drafts(row, own, count)
                drafts.num[i] = len(found)
                drafts.tokens[i, : len(found)] = found
        return drafts

    def _drafts(self, row: int, own: Occurrences, most: int) -> list[int]:
        if not own.enter(0, SLICE):
            return []
        tokens, depth = own.tokens(0), self._limits.depth
        best, best_score = list[int](), 0.0
        for places in (
            list(own.find(tokens, depth, _CANDIDATES)),
            list(self._outputs.find(tokens, depth, _CANDIDATES, besides=self._number[row])),
        ):
            if not places:
                continue
            longest = max(place.length for place in places)
            closest = [place for place in places if place.length == longest]
            for group in (closest, places) if len(closest) < len(places) else (closest,):
                length = min(place.length for place in group)
                found, score = _most_frequent(
                    tokens, group, min(most, self._allowed[length]), self._limits.least_chance
                )
                if score > best_score:
                    best, best_score = found, score
        return best


def _most_frequent(own: list[int], places: list[Occurrence], most: int, least_chance: float) -> tuple[list[int], float]:
    """What followed most of the places, token by token, and how many of it are expected to be right.

    In the row's `own` text a continuation that reaches the end goes round, as a repetition does.
    """
    going: dict[tuple[int, ...], int] = {}
    for place in places:
        text, at = place.text, place.at
        following = tuple(copied(text, at, most) if text is own else text[at : at + most])
        going[following] = going.get(following, 0) + 1
    found, score = list[int](), 0.0
    while len(found) < most:
        at, counts = len(found), dict[int, int]()
        for following, count in going.items():
            if at < len(following):
                counts[following[at]] = counts.get(following[at], 0) + count
        # Of equals the first: it is the latest.
        token = max(counts, key=counts.__getitem__, default=-1)
        chance = counts.get(token, 0) / max(1, len(places))
        if token < 0 or chance < least_chance:
            break
        found.append(token)
        score += chance
        going = {following: count for following, count in going.items() if following[at : at + 1] == (token,)}
        if len(going) == 1:  # nothing to choose any more, and the chance stays
            (rest,) = going
            found += rest[at + 1 :]
            score += chance * len(rest[at + 1 :])
            break
    return found, score
