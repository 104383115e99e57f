"""The detokenizer against its definition: the full decode, cut at the stop string that is completed first."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.runtime.detokenizer import Detokenizer
from slipring.runtime.model import open_model
from slipring.runtime.tokenizer import Tokenizer
from tests.runtime.test_tokenizer import build, made_up, sentencepiece_fields


@cache
def smollm2() -> Tokenizer:
    return open_model("smollm2").tokenizer()


def cut(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The obviously right version: try every end, the longest stop first."""
    for end in range(1, len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end if include else end - len(s)], s
    return text, None


def longest_held(text: str, stop: tuple[str, ...]) -> int:
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def run(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces = []
    for i in ids:
        pieces.append(detokenizer.push(i))
        if detokenizer.stopped is not None:
            break
    return [*pieces, detokenizer.finish()]


BYTE_IDS = [i for i in range(17, 400) if len(smollm2().token_bytes(i)) == 1]
"""Tokens of a single byte: random sequences of them are mostly malformed UTF-8."""
ids_strategy = st.lists(
    st.integers(0, 49151) | st.sampled_from(BYTE_IDS) | st.integers(0, 20) | st.integers(49152, 60000), max_size=40
) | st.text(max_size=30).map(lambda text: smollm2().encode(text))


@settings(max_examples=600, deadline=None)
@given(ids=ids_strategy, skip=st.booleans())
def test_without_stops_the_pieces_are_the_full_decode(ids: list[int], skip: bool) -> None:
    tokenizer = smollm2()
    full = tokenizer.decode(ids, skip)
    assert "".join(run(Detokenizer(tokenizer, (), False, skip), ids)) == full
    assert full == tokenizer._rust.decode([i for i in ids if i < 49152], skip_special_tokens=skip)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), ids=ids_strategy, skip=st.booleans(), include=st.booleans())
def test_cut_at_the_stop_that_is_completed_first(
    data: st.DataObject, ids: list[int], skip: bool, include: bool
) -> None:
    tokenizer = smollm2()
    full = tokenizer.decode(ids, skip)
    near = [
        full[i : i + n] + tail
        for i in range(0, len(full), 3)
        for n in (1, 2, 5, 17)
        for tail in ("", "Z")
        if full[i : i + n]
    ]
    one = st.text(min_size=1, max_size=6) | st.text("ab \n", min_size=1, max_size=4)
    stop = tuple(data.draw(st.lists(st.sampled_from(near) | one if near else one, min_size=1, max_size=16)))
    expected, stopped = cut(full, stop, include)
    detokenizer = Detokenizer(tokenizer, stop, include, skip)
    assert "".join(run(detokenizer, ids)) == expected
    assert detokenizer.stopped == stopped
    shuffled = Detokenizer(tokenizer, stop[::-1], include, skip)
    assert "".join(run(shuffled, ids)) == expected


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=60),
    stop=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=20).map(tuple),
)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stop: tuple[str, ...]) -> None:
    tokenizer = smollm2()
    detokenizer = Detokenizer(tokenizer, stop)
    seen, sent = "", ""
    for token in [tokenizer.encode(c)[0] for c in text]:
        seen += tokenizer.token_text(token)
        sent += detokenizer.push(token)
        if detokenizer.stopped is not None:
            assert sent == cut(seen, stop, False)[0]
            return
        assert sent == seen[: len(seen) - longest_held(seen, stop)]
    assert sent + detokenizer.finish() == seen


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("KLMNOPQRSTUVWXYZ", ("NOPQRST",), "KLM", "NOPQRST"),
        ("KLMNOPQRSTUVWXYZ", ("T",), "KLMNOPQRS", "T"),
        ("KLMNOPQRSTUVWXYZ", ("QRS", "NO"), "KLM", "NO"),
        ("KLMNOPQRSTUVWXYZ", ("KLM",), "", "KLM"),
        ("KLMNOPQRSTUVWXYZ", ("LMNOPQ", "NO"), "KLM", "NO"),
        ("KLMNOPQRSTUVWXYZ", ("MNO", "NO", "O"), "KL", "MNO"),
        ("a 😀 b", ("😀",), "a ", "😀"),
        ("abababac", ("ababac",), "ab", "ababac"),
        ("the end", ("endZZZ",), "the end", None),
    ],
)
def test_examples(text: str, stop: tuple[str, ...], expected: str, stopped: str | None) -> None:
    tokenizer = smollm2()
    detokenizer = Detokenizer(tokenizer, stop)
    assert "".join(run(detokenizer, tokenizer.encode(text))) == expected
    assert detokenizer.stopped == stopped
    assert detokenizer.push(100) == "" == detokenizer.finish() or stopped is None


def test_invalid_bytes_do_not_stall_the_stream() -> None:
    tokenizer = smollm2()
    lone = next(
        i for i in BYTE_IDS if tokenizer.token_bytes(i)[0] >= 0xF8 or tokenizer.token_bytes(i)[0] in range(128, 192)
    )
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(lone) for _ in range(100)] == ["�"] * 100
    lead = next(i for i in BYTE_IDS if tokenizer.token_bytes(i)[0] in range(0xE1, 0xF0))
    assert (detokenizer.push(lead), detokenizer.finish()) == ("", "�")


def test_no_piece_of_an_emoji_is_sent() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("😀👨‍👩‍👧 你好 é")
    pieces = run(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == "😀👨‍👩‍👧 你好 é"
    assert not any("�" in piece for piece in pieces)


def test_no_piece_of_an_emoji_is_sent_where_bytes_are_tokens() -> None:
    tokenizer = build(made_up(**sentencepiece_fields(random.Random(3))))
    text = "a 😀👨‍👩‍👧 你好 é"
    pieces = run(Detokenizer(tokenizer), tokenizer.encode(text))
    assert "".join(pieces) == f" {text}", "it goes on behind a prompt, so the blank of its first word is written"
    assert not any("\ufffd" in piece for piece in pieces)
    stopped = Detokenizer(tokenizer, ("你",))
    assert "".join(run(stopped, tokenizer.encode(text))) == f" {text[: text.index('你')]}"


def test_the_first_min_tokens_tokens_are_not_searched() -> None:
    ids = smollm2().encode("one two one two")
    half = len(smollm2().encode("one two"))
    assert "".join(run(Detokenizer(smollm2(), ("two",)), ids)) == "one "
    detokenizer = Detokenizer(smollm2(), ("two",), min_tokens=half)
    assert "".join(run(detokenizer, ids)) == "one two one " and detokenizer.stopped == "two"
    assert "".join(run(Detokenizer(smollm2(), ("two",), min_tokens=99), ids)) == "one two one two"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(smollm2(), ("a", ""))


def cost(detokenizer: Detokenizer, ids: list[int]) -> float:
    start = time.process_time()
    for i in ids:
        detokenizer.push(i)
    return (time.process_time() - start) / len(ids)


def test_cost_per_token_does_not_depend_on_the_stop_strings_length() -> None:
    tokenizer = smollm2()
    a = tokenizer.encode("a")[0]
    ids = [a] * 20_000
    short = min(cost(Detokenizer(tokenizer, ("aaaab",)), ids) for _ in range(3))
    # Held back for all of the stream, and then let go one character at a time.
    held = min(cost(Detokenizer(tokenizer, ("a" * 30_000,)), ids) for _ in range(3))
    released = min(cost(Detokenizer(tokenizer, ("a" * 10_000 + "b",)), ids) for _ in range(3))
    assert held < 4 * short + 2e-6
    assert released < 4 * short + 2e-6


def test_a_token_without_stops_is_cheap() -> None:
    tokenizer = smollm2()
    generator = random.Random(1)
    ids = [generator.randrange(17, 49152) for _ in range(20_000)]
    cost(Detokenizer(tokenizer), ids)
    # The aim is 1.5 us on a quiet core (0.3 measured); the bound leaves room for a busy machine.
    assert min(cost(Detokenizer(tokenizer), ids) for _ in range(5)) < 5e-6
