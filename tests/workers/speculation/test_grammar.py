"""Forced tokens as drafts: all of them are right, nothing else changes, and another proposer goes on behind them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.draft_model import DraftModelProposer
from slipring.workers.speculation.grammar import GrammarProposer, _then
from slipring.workers.speculation.ngram import NgramProposer
from slipring.workers.speculation.proposer import Drafts, NullProposer
from slipring.workers.speculation.step_costs import StepCosts
from slipring.workers.speculation.suffix import Limits, SuffixProposer
from tests.workers.constrained_rig import (
    EOS,
    PROMPT,
    SCHEMA,
    byte_spec,
    constrained,
    json_grammar,
    run_to_the_end,
    text,
    with_grammars,
)
from tests.workers.runner_rig import Rig, Sequence
from tests.workers.speculation.test_draft_model import with_draft_model

LIST = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
MOST = 6


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return byte_spec(tmp_path_factory.mktemp("byte-model"))


def rig_with(spec: ModelSpec, schema: Any, kind: str | None) -> tuple[Rig, NgramProposer | None]:
    rig = Rig(spec, max_draft=MOST if kind else 0, num_blocks=512, max_model_len=512)
    with_grammars(rig, json_grammar(schema))
    if kind is None:
        return rig, None
    lookup = NgramProposer(16, 2, 4) if kind != "alone" else None
    flat = StepCosts((1, 64), [1.0, 1.001])  # whatever is drafted pays
    inner = NullProposer() if lookup is None else AdaptiveProposer(lookup, flat, 16)
    told = [lookup] if lookup is not None and kind == "told" else []
    runner = rig.runner
    runner.proposer = GrammarProposer(runner._constraints, inner, told, 16)
    return rig, lookup


def write(rig: Rig, params: list[SamplingParams]) -> tuple[list[Sequence], int, int]:
    """The sequences, how many steps they took, and how often one of a row's drafts was wrong."""
    sequences, runs = [rig.admit(PROMPT, each) for each in params], list[int]()
    original = rig.runner.run

    def run(step: Any, output: Any) -> None:
        original(step, output)
        num = int(output.header[output.NUM_ROWS])
        runs.append(int((output.num_draft[:num] > output.num_accepted[:num] - 1).sum()))

    rig.runner.run = run  # type: ignore[method-assign]
    run_to_the_end(rig, sequences, 400)
    return sequences, len(runs), sum(runs)


PARAMS = [
    constrained(0),
    constrained(1, temperature=0.0),
    constrained(2, repetition_penalty=1.2, min_tokens=20),
    constrained(3, top_k=5, logprobs=2),
]


@pytest.mark.parametrize("kind", ["alone", "told", "untold"])
def test_tokens_are_those_without_and_take_fewer_steps(spec: ModelSpec, kind: str) -> None:
    want, plain_steps, _ = write(rig_with(spec, LIST, None)[0], PARAMS)
    rig, lookup = rig_with(spec, LIST, kind)
    got, steps, wrong = write(rig, PARAMS)
    assert [s.outputs[: s.outputs.index(EOS)] for s in got] == [s.outputs[: s.outputs.index(EOS)] for s in want]
    assert all(json.loads(text(s)) for s in got)
    if kind == "alone":
        assert steps < 0.6 * plain_steps and wrong == 0
    elif lookup is not None:
        assert steps < 0.6 * plain_steps
        for sequence in got:  # nothing was told twice, or not at all
            index = lookup._index[sequence.row]
            assert index is not None and index.tokens == sequence.tokens


KINDS = ["ngram", "suffix", "draft model"]


def known_to(proposer: Any, row: int) -> list[int]:
    if isinstance(proposer, DraftModelProposer):
        return proposer._tokens[row, : proposer._length[row]].tolist()
    text = proposer._own[row].tokens(0) if isinstance(proposer, SuffixProposer) else proposer._index[row].tokens
    return list(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("all_but", [0, 2], ids=["behind the last", "before the last"])
def test_told_tokens_are_taken_back_where_a_draw_behind_one_fails(
    spec: ModelSpec, kind: str, all_but: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher of a draft fails, as at its limits; that of the row does not."""
    want, *_ = write(rig_with(spec, LIST, None)[0], PARAMS[:2])
    if kind == "draft model":
        rig, told = with_draft_model(spec, spec, max_draft=MOST, num_blocks=512, max_model_len=512)
    else:
        rig = Rig(spec, max_draft=MOST, num_blocks=512, max_model_len=512)
        told = NgramProposer(16, 2, 4) if kind == "ngram" else SuffixProposer(16, Limits(8, 1.0, 0.1), 8)
    constraints = with_grammars(rig, json_grammar(LIST)).runner._constraints
    rig.runner.proposer = proposer = GrammarProposer(constraints, told, [told], 16)
    follow, failed = constraints._follow, dict[int, int]()

    def fails_once(row: int, matcher: Any, place: int, token: int, shared: bool) -> Any:
        further, num_told = follow(row, matcher, place, token, shared), int(proposer._told[row])
        if 3 <= num_told < MOST and row not in failed and place == num_told - 1 - all_but:
            assert further is not None
            further.accept([EOS + 1])
            failed[row] = num_told
        return further

    monkeypatch.setattr(constraints, "_follow", fails_once)
    got, *_ = write(rig, PARAMS[:2])
    assert len(failed) == 2
    for sequence, reference in zip(got, want, strict=True):
        assert sequence.outputs[: sequence.outputs.index(EOS)] == reference.outputs[: reference.outputs.index(EOS)]
        assert known_to(told, sequence.row) == sequence.tokens
    if isinstance(told, SuffixProposer):
        written = [" ".join(map(str, sequence.tokens)) for sequence in got]
        texts = [" ".join(map(str, told._outputs.tokens(number))) for number in told._outputs._texts]
        assert len(texts) == 4 and all(any(text in whole for whole in written) for text in texts)


def test_a_free_row_beside_them_has_no_forced_tokens(spec: ModelSpec) -> None:
    want = write(rig_with(spec, SCHEMA, None)[0], [PARAMS[0]])[0]
    rig, _ = rig_with(spec, SCHEMA, "alone")
    free, bound = rig.admit(PROMPT, SamplingParams(max_tokens=60, temperature=0.0)), rig.admit(PROMPT, PARAMS[0])
    rig.generate([free, bound], len(want[0].outputs))
    assert bound.outputs[: len(want[0].outputs)] == want[0].outputs


def test_a_text_that_is_forced_whole_is_written_in_a_few_steps(spec: ModelSpec) -> None:
    rig, _ = rig_with(spec, {"const": "a text of thirty bytes or so"}, "alone")
    (sequence,), steps, wrong = write(rig, [PARAMS[0]])
    assert json.loads(text(sequence)) == "a text of thirty bytes or so" and wrong == 0
    assert steps <= 2 + len(sequence.outputs) / MOST


def test_a_tree_hangs_below_the_forced_tokens() -> None:
    forced = Drafts(np.array([[7, 8], [0, 0], [9, 0]]), np.array([2, 0, 1]))
    tree = Drafts(np.array([[1, 2, 3], [4, 5, 0], [0, 0, 0]]), np.array([3, 2, 0]), np.array([[-1, -1, 0]] * 3))
    both = _then(forced, tree)
    assert both.num.tolist() == [5, 2, 1] and both.parents is not None
    assert both.tokens[0].tolist() == [7, 8, 1, 2, 3] and both.parents[0].tolist() == [-1, 0, 1, 1, 2]
    assert both.tokens[1, :2].tolist() == [4, 5] and both.parents[1, :2].tolist() == [-1, -1]
    assert both.tokens[2, 0] == 9 and both.parents[2, 0] == -1
