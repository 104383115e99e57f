"""The incremental index against a plain search through all of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.workers.speculation import ngram
from slipring.workers.speculation.ngram import NgramIndex, NgramProposer


def searched(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """What follows the latest of the longest matches, among the latest few that match at all."""
    length = len(tokens)
    end = tokens[length - least :]
    places = [at for at in range(length - 1, least - 1, -1) if tokens[at - least : at] == end]
    best, longest = None, 0
    for at in places[: ngram._CANDIDATES]:
        size = least
        while size < most and size < at and tokens[at - size - 1] == tokens[length - size - 1]:
            size += 1
        if size > longest:
            best, longest = at, size
    if best is None:
        return []
    again = tokens[best:]
    return (again * count)[:count]


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    prompt=st.integers(0, 60),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 6),
)
def test_the_index_finds_what_a_search_finds(tokens: list[int], prompt: int, least: int, more: int, count: int) -> None:
    index = NgramIndex(tokens[:prompt], least, least + more)
    for token in tokens[prompt:]:
        assert index.propose(count) == searched(index.tokens, least, least + more, count)
        index.tokens.append(token)
    assert index.propose(count) == searched(index.tokens, least, least + more, count)


def test_a_long_prompt_enters_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "SLICE", 10)
    index = NgramIndex(list(range(8)) * 4, 2, 4)
    found = [index.propose(3) for _ in range(4)]
    assert found == [[], [], [], [0, 1, 2]]


def test_rows_do_not_share_and_a_new_admission_forgets() -> None:
    proposer = NgramProposer(4, least=2, most=4)
    proposer.admit(1, np.array([5, 6, 7, 5, 6], np.int32))
    proposer.admit(3, np.array([9, 9, 9], np.int32))
    drafts = proposer.propose(np.array([3, 1]), np.array([2, 3]))
    assert drafts.num.tolist() == [2, 3]
    assert drafts.tokens[0, :2].tolist() == [9, 9] and drafts.tokens[1].tolist() == [7, 5, 6]
    proposer.accept(np.array([1]), np.array([[7, 5, -1]]), np.array([2]))
    assert proposer.propose(np.array([1]), np.array([2])).tokens[0].tolist() == [6, 7]
    proposer.admit(1, np.array([1, 2, 3], np.int32))
    assert proposer.propose(np.array([1]), np.array([2])).num.tolist() == [0]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    least=st.integers(1, 3),
    depth=st.integers(1, 4),
    most=st.integers(1, 12),
)
def test_a_tree_holds_what_followed_earlier_places(tokens: list[int], least: int, depth: int, most: int) -> None:
    found, parents = NgramIndex(tokens, least, 5).propose_tree(most, depth)
    end, paths = tokens[len(tokens) - least :], list[tuple[int, ...]]()
    for token, parent in zip(found, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    places = [at for at in range(least, len(tokens)) if tokens[at - least : at] == end]
    followed = {tuple((tokens[at:] * depth)[:depth]) for at in places[-ngram._CANDIDATES :]}
    assert len(set(paths)) == len(paths) <= most, "no draft stands there twice"
    assert all(any(path == begin[: len(path)] for begin in followed) for path in paths)
    if len(paths) < most:
        assert {path for path in paths if len(path) == depth} == followed
    if paths:
        chain = searched(tokens, least, 5, min(depth, most))
        assert list(paths[len(chain) - 1]) == chain, "the likeliest continuation comes first"
