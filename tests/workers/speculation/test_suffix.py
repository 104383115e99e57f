"""Suffix decoding: the index against a plain search, drafts by frequency, what rows share, and what is forgotten."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.workers.speculation import suffix
from slipring.workers.speculation.occurrences import Occurrences
from slipring.workers.speculation.suffix import Limits, SuffixProposer

LIMITS = Limits(depth=24, factor=1.0, least_chance=0.1)
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=5)


def proposer(max_outputs: int = 100, limits: Limits = LIMITS) -> SuffixProposer:
    return SuffixProposer(8, limits, max_outputs)


def write(proposer: SuffixProposer, row: int, tokens: list[int]) -> None:
    for token in tokens:
        proposer.accept(np.array([row]), np.array([[token]]), np.array([1]))


def drafts(proposer: SuffixProposer, row: int, most: int = 10) -> list[int]:
    found = proposer.propose(np.array([row]), np.array([most]))
    return found.tokens[0, : found.num[0]].tolist()


@given(texts=TEXTS, end=st.lists(st.integers(0, 2), max_size=8), size=st.integers(1, 3), forgotten=st.integers(0, 2))
def test_all_occurrences_are_found_with_their_lengths(
    texts: list[list[int]], end: list[int], size: int, forgotten: int
) -> None:
    index = Occurrences(size)
    numbers = [index.begin() for _ in texts]
    for place in range(30):  # side by side, as outputs grow
        for number, text in zip(numbers, texts, strict=True):
            index.extend(number, text[place : place + 1])
            index.enter(number, 1)
    wanted: Counter[tuple[int, int, int]] = Counter()
    for number, text in enumerate(texts):
        for at in range(size, len(text)):
            length = next((n for n in range(6) if n >= min(at, len(end)) or text[at - n - 1] != end[-n - 1]), 6)
            if length >= size:
                wanted[(number, at, length)] += 1
    assert index.num_tokens == sum(map(len, texts))
    of = {id(index.tokens(number)): number for number in numbers}
    found = Counter((of[id(each.text)], each.at, each.length) for each in index.find(end, 6, 1000))
    assert found == wanted
    for _ in range(min(forgotten, len(texts))):
        index.forget_oldest()
    left = {(of[id(each.text)], each.at, each.length) for each in index.find(end, 6, 1000)}
    assert left <= {place for place in wanted if place[0] >= forgotten}, "only what is still there"
    assert not left or index.num_tokens > 0


def test_what_followed_most_often_is_drafted_for_as_long_as_the_match() -> None:
    rows = proposer()
    rows.admit(0, np.array([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 8, 1, 2, 3], np.int32))
    # Three tokens match everywhere, and seven the last time: that one is trusted further.
    assert drafts(rows, 0) == [8, 1, 2, 3, 8, 1, 2]
    assert drafts(rows, 0, most=2) == [8, 1]
    rows.admit(1, np.array([1, 2, 3, 7, 9, 1, 2, 3, 8, 9, 4, 1, 2, 3, 8, 6, 5, 1, 2, 3], np.int32))
    assert drafts(rows, 1) == [8, 6, 5], "of equals the latest"


def test_factor_and_chance_bound_the_drafts() -> None:
    text = np.array([5, 6, 7, 1, 2, 3, 4, 8, 5, 6, 7], np.int32)
    for factor, length in ((0.4, 1), (1.0, 3), (2.0, 6), (0.0, 0)):
        rows = proposer(limits=Limits(24, factor, 0.1))
        rows.admit(0, text)
        assert drafts(rows, 0) == [1, 2, 3, 4, 8, 5][:length]
    rows = proposer(limits=Limits(24, 1.0, 0.6))
    rows.admit(0, np.array([1, 2, 3, 7, 9, 1, 2, 3, 8, 9, 4, 1, 2, 3], np.int32))
    assert drafts(rows, 0) == [], "either half of the time"
    assert Limits(24, 4.0, 0.1).drafts()[24] == 19 and max(Limits(8, 1.0, 0.1).drafts()) == 4


def test_rows_learn_from_what_others_write_but_not_from_their_prompts() -> None:
    rows = proposer()
    rows.admit(0, np.array([50, 51, 52, 53, 60, 61, 62], np.int32))
    write(rows, 0, [1, 2, 3, 4, 5, 6])
    rows.admit(1, np.array([9, 60, 61, 62], np.int32))
    assert drafts(rows, 1) == [1, 2, 3], "from the prompt's last tokens on, while the other is still being written"
    rows.admit(2, np.array([50, 51, 52], np.int32))
    assert drafts(rows, 2) == []
    lone = proposer(max_outputs=0)
    lone.admit(0, np.array([60, 61, 62], np.int32))
    write(lone, 0, [1, 2, 3, 4])
    lone.admit(1, np.array([60, 61, 62], np.int32))
    assert drafts(lone, 1) == []


def test_the_oldest_outputs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def learns(rows: SuffixProposer, begin: int) -> bool:
        rows.admit(7, np.arange(begin, begin + 3, dtype=np.int32))
        return bool(drafts(rows, 7))

    rows = proposer(max_outputs=3)
    for row in range(3):
        rows.admit(row, np.array([0], np.int32))
        write(rows, row, list(range(100 * row, 100 * row + 10)))
    assert not learns(rows, 0) and learns(rows, 200), "row 7 is the third"
    monkeypatch.setattr(suffix, "MOST_TOKENS", 50)
    rows = proposer()
    for number in range(20):
        rows.admit(number % 4, np.array([0], np.int32))
        write(rows, number % 4, list(range(100 * number, 100 * number + 10)))
        assert rows._outputs.num_tokens <= 50
    assert not learns(rows, 1000) and learns(rows, 1900)
    assert len(rows._outputs._latest) <= 50, "and takes no memory"
