"""Rows bound to a grammar, in a real runner with random weights: only the grammar makes them say something."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from slipring.shm.grammar import Grammar
from slipring.shm.spec import ModelSpec
from slipring.shm.wire import NO_MATCH, NON_FINITE
from slipring.workers import constraints
from slipring.workers import grammar as worker_grammar
from slipring.workers.constraints import forbid
from slipring.workers.grammar import Matcher
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from tests.byte_tokenizer import EOS
from tests.workers.constrained_rig import (
    PROMPT,
    SCHEMA,
    byte_spec,
    constrained,
    json_grammar,
    run_to_the_end,
    text,
    with_grammars,
)
from tests.workers.runner_rig import GREEDY, Rig
from tests.workers.speculation.test_tree import Oracle


class Seer(NullProposer):
    """Tells four tokens each time, of which the first so many are right."""

    def __init__(self, num_right: int) -> None:
        self.num_right = num_right
        self.answers: dict[int, list[int]] = {}
        self.told: dict[int, int] = {}

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.told[row] = self.told.get(row, 0) + count

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            begin = self.told.get(row, 0)
            known = self.answers.get(row, [])[begin : begin + count]
            drafts.num[i] = len(known)
            drafts.tokens[i, : len(known)] = [
                token if place < self.num_right else token ^ 3 for place, token in enumerate(known)
            ]
        return drafts


LETTERS = Grammar(LLMatcher.grammar_from_regex("[ab]{1,12}"), "regex")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return byte_spec(tmp_path_factory.mktemp("tiny"))


def rig(spec: ModelSpec) -> Rig:
    return with_grammars(Rig(spec), json_grammar(SCHEMA), LETTERS)


def test_rows_follow_their_grammars_beside_free_rows(spec: ModelSpec) -> None:
    ours, alone = rig(spec), Rig(spec)
    rows = [ours.admit(PROMPT, constrained(seed)) for seed in range(3)]
    free, twin = ours.admit(PROMPT, GREEDY), alone.admit(PROMPT, GREEDY)
    run_to_the_end(ours, [*rows, free])
    for row in rows:
        jsonschema.validate(json.loads(text(row)), SCHEMA)
    alone.generate([twin], len(free.outputs))
    assert free.outputs == twin.outputs


def test_a_preempted_row_goes_on_where_it_stopped(spec: ModelSpec) -> None:
    whole = rig(spec)
    expected = whole.admit(PROMPT, constrained(5))
    run_to_the_end(whole, [expected])
    for cut in (1, 4, len(expected.outputs) - 1):
        ours = rig(spec)
        ours.admit(PROMPT, constrained(9, grammar=2))  # what the row's grammar was before means nothing
        again = ours.admit(PROMPT, constrained(5), outputs=expected.outputs[:cut])
        ours.run([], [(again, len(again.tokens))])
        run_to_the_end(ours, [again])
        assert expected.outputs[:cut] + again.outputs == expected.outputs


def test_a_preempted_row_keeps_its_penalties_and_its_least_number_of_tokens(spec: ModelSpec) -> None:
    changes = {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 8,
               "grammar": 2, "logit_bias": ((EOS, 4.0),)}  # fmt: skip
    whole = rig(spec)
    expected = whole.admit(PROMPT, constrained(5, **changes))
    run_to_the_end(whole, [expected])
    assert len(expected.outputs) >= 9
    for cut in range(1, len(expected.outputs)):
        ours = rig(spec)
        again = ours.admit(PROMPT, constrained(5, **changes), outputs=expected.outputs[:cut])
        ours.run([], [(again, len(again.tokens))])
        run_to_the_end(ours, [again])
        assert expected.outputs[:cut] + again.outputs == expected.outputs


@pytest.mark.parametrize("num_right", [0, 2, 4, None], ids=["wrong", "half", "right", "a tree"])
def test_drafts_that_may_break_the_grammar_change_no_token(spec: ModelSpec, num_right: int | None) -> None:
    """Beside a free row; wrong drafts are mostly against the grammar, too."""
    plain = rig(spec)
    want = [plain.admit(PROMPT, constrained(seed)) for seed in range(3)] + [plain.admit(PROMPT, GREEDY)]
    run_to_the_end(plain, want[:3])
    plain.generate(want[3:], 40)
    seer = Oracle({}) if num_right is None else Seer(num_right)
    ours = with_grammars(
        Rig(spec, proposer=seer, max_draft=4 if num_right is not None else 8), json_grammar(SCHEMA), LETTERS
    )
    rows = [ours.admit(PROMPT, constrained(seed)) for seed in range(3)] + [ours.admit(PROMPT, GREEDY)]
    seer.answers = {row.row: reference.outputs for row, reference in zip(rows, want, strict=True)}
    run_to_the_end(ours, rows[:3])
    for row, reference in zip(rows[:3], want, strict=False):
        end = row.outputs.index(EOS) + 1
        assert row.outputs[:end] == reference.outputs
        jsonschema.validate(json.loads(bytes(row.outputs[: end - 1])), SCHEMA)
    ours.generate(rows[3:], 20)
    assert rows[3].outputs[:20] == want[3].outputs[:20]


def test_the_end_of_sequence_is_forced_and_what_follows_it_does_no_harm(spec: ModelSpec) -> None:
    ours = rig(spec)
    row = ours.admit(PROMPT, constrained(1, grammar=2, logit_bias=((EOS, -100.0), (97, 50.0))))
    ours.generate([row], 16)
    assert row.outputs == [97] * 12 + [EOS] * 4


@pytest.mark.parametrize(("changes", "most"), [({"min_tokens": 7}, 7), ({"stop_token_ids": ()}, 12)])
def test_an_output_goes_on_while_it_can(spec: ModelSpec, changes: dict, most: int) -> None:
    """min_tokens, and ignored ends of sequence, against a bias that would end it at once."""
    ours = rig(spec)
    row = ours.admit(PROMPT, constrained(1, grammar=2, logit_bias=((EOS, 100.0),), **changes))
    run_to_the_end(ours, [row])
    assert len(row.outputs) == most + 1


def test_logprobs_are_those_of_the_raw_distribution(spec: ModelSpec) -> None:
    ours, free = rig(spec), Rig(spec)
    row = ours.admit(PROMPT, constrained(logprobs=3))
    twin = free.admit(PROMPT, constrained(logprobs=3, grammar=0))
    ours.run([], [(row, len(PROMPT))])
    free.run([], [(twin, len(PROMPT))])
    assert (ours.output.top_ids[0, :3] == free.output.top_ids[0, :3]).all()
    np.testing.assert_allclose(ours.output.top_logprobs[0, :3], free.output.top_logprobs[0, :3], rtol=1e-6)
    assert row.outputs == [ord("{")] and ours.output.logprob[0] < 0


@pytest.mark.parametrize("max_draft", [0, 3])
def test_a_grammar_that_grows_too_complex_ends_its_row_alone(
    max_draft: int, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of a step are met in the middle of an output."""
    monkeypatch.setattr(worker_grammar, "LIMITS", {**worker_grammar.LIMITS, "step_max_items": 50})
    ambiguous = LLMatcher.grammar_from_lark('start: a*\na: "x" a? | "x" "x" a?')
    ours = with_grammars(Rig(spec, max_draft=max_draft), Grammar(ambiguous, "lark"))
    row, free = ours.admit(PROMPT, constrained(logit_bias=((EOS, -100.0),))), ours.admit(PROMPT, GREEDY)
    codes = []
    for step in range(40):
        ours.run([], [(row, 3), (free, 3)]) if step == 0 else ours.run([row, free])
        codes.append(ours.output.num_accepted[:2].tolist())
    assert codes[0] == [1, 1] and [NO_MATCH, 1] in codes and all(code[1] == 1 for code in codes)


@pytest.mark.parametrize("max_draft", [0, 3])
def test_what_one_row_finds_out_of_a_grammar_is_not_too_much_for_another(
    max_draft: int, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two branches is within the limits on a grammar's states, both together are not; the third is not."""
    monkeypatch.setattr(worker_grammar, "LIMITS", {**worker_grammar.LIMITS, "max_lexer_states": 75})
    branches = LLMatcher.grammar_from_regex("A[a-z]{40}|B[a-y]{40}|C[a-x]{400}")
    ours = with_grammars(Rig(spec, max_draft=max_draft, max_model_len=512, num_blocks=256), Grammar(branches, "regex"))
    for begins in ("AB", "C", "BA"):
        rows = [ours.admit(PROMPT, constrained(logit_bias=((ord(letter), 100.0),))) for letter in begins]
        run_to_the_end(ours, rows, 100 if begins != "C" else 70)
        lengths = [len(text(row)) for row in rows]
        assert lengths == [41, 41] if begins != "C" else 40 < lengths[0] < 75


BRANCHES = LLMatcher.grammar_from_regex("A[a-z]{40}|C[a-x]{50}")


def branching(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, list[Matcher]]:
    """Each of the two branches is within the limits on a grammar's states, both together are not. And what is built
    from then on."""
    monkeypatch.setattr(worker_grammar, "LIMITS", {**worker_grammar.LIMITS, "max_lexer_states": 75})
    ours, built = with_grammars(Rig(spec, max_model_len=512, num_blocks=256), Grammar(BRANCHES, "regex")), []
    begin = ours.grammars._begin

    def noted(text: str) -> Matcher:
        built.append(begin(text))
        return built[-1]

    monkeypatch.setattr(ours.grammars, "_begin", noted)
    return ours, built


def test_rows_that_begin_anew_in_one_step_share_what_one_of_them_builds(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, built = branching(spec, monkeypatch)
    rows = [ours.admit(PROMPT, constrained(logit_bias=((ord(letter), 100.0),))) for letter in "AAACAA"]
    run_to_the_end(ours, rows, 100)
    assert [len(text(row)) for row in rows] == [41, 41, 41, 51, 41, 41]
    assert len(built) == 3, "one for all, one for the row that was too much beside them, one for those it failed with"


def test_rows_do_not_begin_anew_for_so_long_that_the_worker_would_pass_for_hung(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "_MOST_BUILDING_S", 0.0)
    ours, built = branching(spec, monkeypatch)
    rows = [ours.admit(PROMPT, constrained(logit_bias=((ord(letter), 100.0),))) for letter in "AC"]
    ours.run([], [(row, len(PROMPT)) for row in rows])
    codes = []
    while NO_MATCH not in codes:
        ours.run(rows)
        codes = ours.output.num_accepted[:2].tolist()
    assert codes == [1, NO_MATCH] and len(built) == 1
    run_to_the_end(ours, rows[:1])
    assert len(text(rows[0])) == 41


def test_a_row_that_may_draw_nothing_says_so(spec: ModelSpec) -> None:
    ours = rig(spec)
    ours.model.embedding[50] = float("nan")
    bad, good = ours.admit([50, 4, 5], constrained(1)), ours.admit(PROMPT, constrained(2))
    ours.run([], [(bad, 3), (good, 3)])
    assert ours.output.num_accepted[:2].tolist() == [NON_FINITE, 1]


@given(st.sets(st.integers(0, 95)), st.sets(st.integers(0, 95)))
def test_forbid_never_leaves_nothing(allowed: set[int], tokens: set[int]) -> None:
    bits = np.zeros(96, np.uint8)
    bits[list(allowed)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32).copy()
    forbid(mask, np.array(sorted(tokens), np.int64))
    left = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert left == (allowed - tokens or allowed)
