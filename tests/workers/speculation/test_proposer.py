"""What every proposer may rely on, whoever asks it: the runner itself, or a proposer around it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.grammar import GrammarProposer
from slipring.workers.speculation.proposer import PROPOSAL, Drafts, IntArray, NullProposer, Proposer
from slipring.workers.speculation.step_costs import StepCosts
from tests.workers.constrained_rig import PROMPT, SCHEMA, byte_spec, constrained, json_grammar, with_grammars
from tests.workers.runner_rig import GREEDY, Rig

MOST = 4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return byte_spec(tmp_path_factory.mktemp("byte-model"))


class Strict(NullProposer):
    """Is caught up once before it is asked, for those rows that it is asked for."""

    def __init__(self, is_free: bool) -> None:
        self.is_free = is_free
        self.caught_up: list[list[int]] = []
        self.num_asked = 0

    def catch_up(self, rows: IntArray) -> None:
        self.caught_up.append(rows.tolist())

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        assert self.caught_up == [rows[most > 0].tolist()]
        self.caught_up.clear()
        self.num_asked += int(most.any())
        return Drafts(np.ones((len(rows), int(most.max(initial=0))), np.int64), most.copy())


@pytest.mark.parametrize("is_free", [True, False], ids=["free", "at a cost"])
@pytest.mark.parametrize("around", ["nobody", "controller", "grammar", "grammar told", "grammar and controller"])
def test_whoever_asks_has_let_it_catch_up_once(spec: ModelSpec, around: str, is_free: bool) -> None:
    rig = Rig(spec, max_draft=MOST, num_blocks=256)
    with_grammars(rig, json_grammar(SCHEMA))
    strict = Strict(is_free)
    proposer: Proposer = strict
    if "controller" in around:
        proposer = AdaptiveProposer(strict, StepCosts((1, 64), [1.0, 1.001]), 16)
    if "grammar" in around:
        proposer = GrammarProposer(rig.runner._constraints, proposer, [strict] if "told" in around else [], 16)
    rig.runner.proposer = proposer
    sequences = [rig.admit(PROMPT, params) for params in (constrained(0), constrained(1), GREEDY)]
    rig.generate(sequences, 12)
    assert strict.num_asked > 4


@given(data=st.data(), num_rows=st.integers(1, 4), wide=st.integers(0, 4), narrow=st.integers(0, 3))
def test_the_one_has_what_the_other_has_not(data: st.DataObject, num_rows: int, wide: int, narrow: int) -> None:
    def some(width: int, base: int, tree: bool, size: int) -> Drafts:
        num = np.array([data.draw(st.integers(0, width)) for _ in range(num_rows)])
        tokens = base + np.arange(num_rows * width).reshape(num_rows, width)
        parents = np.maximum(np.tile(np.arange(-1, width - 1), (num_rows, 1)) - 1, -1) if tree else None
        proposals = np.zeros((num_rows, width, size), PROPOSAL) if size else None
        if proposals is not None:
            proposals["token_id"] = tokens[:, :, None]
        return Drafts(tokens, num, parents, proposals=proposals)

    tree = data.draw(st.booleans())
    one, other = some(wide, 0, tree, 0 if tree else data.draw(st.integers(0, 2))), some(narrow, 1000, False, 0)
    both = one.or_else(other)
    for row in range(num_rows):
        source = one if one.num[row] else other
        num = int(source.num[row])
        assert both.num[row] == num
        assert both.tokens[row, :num].tolist() == source.tokens[row, :num].tolist()
        assert both.follows[row, :num].tolist() == source.follows[row, :num].tolist()
        if both.proposals is not None:
            named = source.tokens[row, :num] if source.proposals is not None else np.zeros(num)
            assert (both.proposals["token_id"][row, :num] == named[:, None]).all()
    assert (both.follows < np.arange(both.tokens.shape[1])).all(), "also beyond what is there"
