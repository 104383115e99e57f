"""One matcher: rolling back, forced tokens, copies; and the store's answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from slipring.shm.control import BuildGrammar, DropGrammar, GrammarBuilt
from slipring.shm.grammar import Grammar
from slipring.workers.grammar import GrammarStore, Matcher, MatcherBatch, num_mask_words
from tests.byte_tokenizer import EOS
from tests.workers.constrained_rig import SCHEMA, byte_spec, json_grammar, with_grammars
from tests.workers.runner_rig import Rig

VOCAB = 260


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> GrammarStore:
    return with_grammars(Rig(byte_spec(tmp_path_factory.mktemp("tiny"))), json_grammar(SCHEMA)).grammars


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros(num_mask_words(VOCAB), np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_what_was_accepted_can_be_taken_back(store: GrammarStore) -> None:
    matcher = store.matcher(1)
    masks = [allowed(matcher)]
    for byte in (document := b'{"name":"ab","n":40}'):
        matcher.accept([byte])
        masks.append(allowed(matcher))
    assert masks[-1] == {EOS} and matcher.num_accepted == len(document)
    matcher.accept([EOS])
    matcher.rollback(5)
    assert matcher.num_accepted == len(document) - 4 and allowed(matcher) == masks[-5]
    matcher.accept([*document[-4:], EOS, EOS, 7])
    assert allowed(matcher) == {EOS} and matcher.forced() == []
    matcher.rollback(4)
    assert allowed(matcher) == masks[-2]
    assert matcher.error is None


def test_forced_tokens_are_what_must_come(store: GrammarStore) -> None:
    matcher = store.matcher(1)
    assert bytes(matcher.forced()) == b'{"name":"'
    matcher.accept(list(b'{"name":"ab"'))
    assert bytes(matcher.forced()) == b',"n":'


def test_copies_go_their_own_ways(store: GrammarStore) -> None:
    one = store.matcher(1)
    one.accept(list(b'{"name":"'))
    two = one.copy()
    two.accept(list(b'abcdef"'))
    assert allowed(one) != allowed(two) == {ord(",")}
    assert store.matcher(1).num_accepted == 0


def test_a_batch_does_what_each_would_do(store: GrammarStore) -> None:
    singles, batched = ([store.matcher(1) for _ in range(3)] for _ in range(2))
    batch, masks = MatcherBatch(1), np.zeros((5, num_mask_words(VOCAB)), np.int32)
    for step in range(9):
        tokens = [b'{"name":"'[step]] * 3
        batch.accept(batched, tokens)
        for single in singles:
            single.accept(tokens[:1])
    batch.fill(batched, masks, [4, 0, 2])
    alone = np.zeros(num_mask_words(VOCAB), np.int32)
    singles[0].fill(alone)
    assert (masks[[0, 2, 4]] == alone).all() and not masks[[1, 3]].any()
    assert [m.num_accepted for m in batched] == [9, 9, 9]


def test_a_wrong_token_is_an_error_and_not_a_crash(store: GrammarStore) -> None:
    matcher = store.matcher(1)
    matcher.accept([ord("x")])
    assert matcher.error is not None


def test_the_store_answers_for_itself(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipring.workers.grammar._KEPT_LEAVING", 1)
    bad = Grammar(LLMatcher.grammar_from_regex("(a"), "regex")
    answer = store.handle(BuildGrammar(7, bad))
    assert isinstance(answer, GrammarBuilt) and answer.grammar_id == 7 and "unclosed" in (answer.error or "")
    assert store.handle(BuildGrammar(8, json_grammar({"const": 1}))) == GrammarBuilt(8)
    assert store.handle(DropGrammar(8)) is None
    assert store.matcher(8), "a step that is on its way may still begin a row with it"
    assert store.handle(BuildGrammar(9, json_grammar({"const": 2}))) == GrammarBuilt(9)
    assert store.handle(DropGrammar(9)) is None
    for grammar_id in (7, 8):
        with pytest.raises(KeyError):
            store.matcher(grammar_id)


def test_what_begins_anew_is_built_once_for_all_that_share_a_build(store: GrammarStore) -> None:
    assert store.handle(BuildGrammar(6, json_grammar({"const": "six"}))) == GrammarBuilt(6)
    one, two = store.matcher(6), store.matcher(6)
    one.build.is_spent = True
    assert two.build.is_spent and store.unspent(6) is None
    again, found = store.anew(6, one.text, keep=True), store.unspent(6)
    assert found is not None and found.build is again.build is store.matcher(6).build is not two.build
    private = store.anew(6, two.text, keep=False)
    assert private.build is not again.build is store.matcher(6).build
    store.handle(DropGrammar(6))
    assert store.anew(6, one.text, keep=True).build is store.matcher(6).build is not again.build


def test_without_a_tokenizer_nothing_is_built(tmp_path: Path) -> None:
    answer = GrammarStore(byte_spec(tmp_path)).handle(BuildGrammar(1, json_grammar({})))
    assert isinstance(answer, GrammarBuilt) and "tokenizer" in (answer.error or "")
