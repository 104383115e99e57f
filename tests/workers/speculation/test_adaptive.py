"""The controller: drafts where they pay, none where they do not, and another try after a while."""

from __future__ import annotations

import numpy as np
import pytest

from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.step_costs import StepCosts

SIZES = (1, 2, 4, 8, 16, 64)
FLAT = [0.010, 0.0102, 0.0106, 0.0114, 0.013, 0.022]
STEEP = [0.010, 0.020, 0.040, 0.080, 0.160, 0.640]


class Eager(NullProposer):
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        return Drafts(np.ones((len(rows), int(most.max())), np.int64), most.copy())


def run(proposer: AdaptiveProposer, rows: list[int], chance: list[float], steps: int, most: int = 5) -> np.ndarray:
    """[steps, rows] drafts that were made, where a row's drafts are right with that chance each."""
    rng, of_rows, made = np.random.default_rng(1), np.array(rows), []
    for _ in range(steps):
        drafts = proposer.propose(of_rows, np.full(len(rows), most))
        right = rng.random((len(rows), most)) < np.array(chance)[:, None]
        accepted = np.minimum(right.cumprod(1).sum(1), drafts.num)
        proposer.accept(of_rows, np.zeros((len(rows), most + 1), np.int64), accepted + 1)
        made.append(drafts.num)
    return np.array(made)


def adaptive(seconds: list[float]) -> AdaptiveProposer:
    proposer = AdaptiveProposer(Eager(), StepCosts(SIZES, seconds), num_rows=8)
    for row in range(8):
        proposer.admit(row, np.zeros(0, np.int32))
    return proposer


def test_right_drafts_are_all_taken_where_tokens_are_cheap() -> None:
    assert (run(adaptive(FLAT), [3], [1.0], 20)[5:] == 5).all()


def test_nothing_is_drafted_where_each_token_costs_a_step() -> None:
    assert run(adaptive(STEEP), [3], [0.5], 100).mean() < 0.3


def test_wrong_drafts_are_dropped_and_tried_again() -> None:
    made = run(adaptive(FLAT), [3], [0.0], 400)[:, 0]
    late = made[100:]
    assert late.mean() < 0.1, "it is switched off"
    assert late.any(), "but not for good"


def test_a_row_that_turns_predictable_is_found() -> None:
    proposer = adaptive(FLAT)
    run(proposer, [3], [0.0], 200)
    assert run(proposer, [3], [1.0], 150)[-20:].mean() > 3


def test_rows_are_judged_by_themselves() -> None:
    made = run(adaptive(FLAT), [1, 2], [0.95, 0.05], 100)[30:]
    assert made[:, 0].mean() > 3 and made[:, 1].mean() < 1.5


def test_a_full_batch_drafts_less_than_a_lone_row() -> None:
    # Beyond 16 tokens each one costs as much as it brings.
    seconds = [0.010, 0.0101, 0.0103, 0.0107, 0.0115, 0.060]
    alone = run(adaptive(seconds), [0], [0.6], 60)[20:].mean()
    full = run(adaptive(seconds), list(range(8)), [0.6] * 8, 60)[20:].mean()
    assert full < alone


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts(SIZES, FLAT)
    for _ in range(100):
        costs.observe(1, 0.020)
    assert costs.of(np.array([1]))[0] == pytest.approx(0.020, rel=0.05)
    assert costs.of(np.array([8]))[0] > 0.015, "a slower machine is slower for all steps"
    for _ in range(100):
        costs.observe(8, 0.050)
    assert costs.of(np.array([8]))[0] == pytest.approx(0.050, rel=0.1)


def test_costs_never_fall_with_more_tokens_and_grow_beyond_the_measured() -> None:
    costs = StepCosts((1, 2, 4), [0.02, 0.01, 0.03])
    assert (np.diff(costs.of(np.arange(1, 5))) >= 0).all()
    assert costs.of(np.array([8]))[0] == pytest.approx(0.06)
