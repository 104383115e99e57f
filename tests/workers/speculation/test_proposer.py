"""What every proposer may rely on, whoever asks it: the runner itself, or a proposer around it."""

from __future__ import annotations

import numpy as np
import pytest

from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.grammar import GrammarProposer
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer, Proposer
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
        proposer = GrammarProposer(rig.runner._constraints, proposer, strict if "told" in around else None, 16)
    rig.runner.proposer = proposer
    sequences = [rig.admit(PROMPT, params) for params in (constrained(0), constrained(1), GREEDY)]
    rig.generate(sequences, 12)
    assert strict.num_asked > 4
