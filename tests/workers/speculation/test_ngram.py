"""The incremental index against a plain search through all of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.workers.speculation import ngram
from slipring.workers.speculation.ngram import Agreements, Copies, NgramIndex, NgramProposer


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
        assert index.propose(count).tokens == searched(index.tokens, least, least + more, count)
        index.tokens.append(token)
    assert index.propose(count).tokens == searched(index.tokens, least, least + more, count)


def test_a_long_prompt_enters_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "SLICE", 10)
    index = NgramIndex(list(range(8)) * 4, 2, 4)
    found = [index.propose(3).tokens for _ in range(4)]
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
    copies = NgramIndex(tokens, least, 5).propose_tree(most, depth)
    found, parents = copies.tokens, copies.parents
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


def test_a_draft_is_trusted_by_how_many_tokens_agree_before_it() -> None:
    """Two that agree are followed by chance, four or more by what followed them before."""
    proposer, agreed = NgramProposer(2, least=2, most=5), list[int]()
    rng, row = np.random.default_rng(3), np.array([1])
    proposer.admit(1, np.arange(100, 110, dtype=np.int32))
    text = rng.integers(0, 12, 400).tolist() + list(range(100, 110)) * 40
    for token in rng.permutation(np.array(text, int).reshape(-1, 10)).ravel().tolist():
        drafts = proposer.propose(row, np.array([3]))
        assert drafts.worth is not None and (np.diff(drafts.worth[0, : drafts.num[0]]) <= 0).all()
        if drafts.num[0]:
            made = proposer._made[1]
            assert made is not None
            agreed.append(made.agreed[0])
        proposer.accept(row, np.array([[token]]), np.array([1]))
    assert set(agreed) >= {2, 5}
    chances = [proposer._agreements.worth(Copies([0], [-1], [length]))[0] for length in (2, 5, 9)]
    assert chances[0] < 0.3 and chances[1] > 0.8 and chances[1] == chances[2]


def test_branches_share_the_chance_and_are_judged_one_after_the_other() -> None:
    agreements, copies = Agreements(4), Copies()
    copies.add([7, 8], 4, 8)
    copies.add([7, 9], 3, 8)
    copies.add([5], 2, 8)
    assert (copies.tokens, copies.parents, copies.agreed) == ([7, 8, 9, 5], [-1, 0, 0, -1], [4, 5, 4, 2])
    a, b = 4 / 5, 2 / 3
    assert agreements.worth(copies) == pytest.approx([a, a * a, a * (1 - a) * a, (1 - a) * b])
    agreements.learn(copies, [7, 9])
    # 7 was right and 8 wrong after four; 9 was right after four. Nothing is known of 5, which was not needed.
    hits = ((4 * a * 0.995 + 1) * 0.995 + 0) * 0.995 + 1
    of = ((4 * 0.995 + 1) * 0.995 + 1) * 0.995 + 1
    assert agreements.worth(Copies([0], [-1], [4])) == pytest.approx([hits / of])
    assert agreements.worth(Copies([0], [-1], [2])) == pytest.approx([b])
