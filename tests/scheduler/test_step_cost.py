"""The step-cost model finds a linear cost, keeps it over long and one-sided traffic, and follows a change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipring.scheduler.step_cost import StepCost


def seconds(rows: int, chunk: int, context: int) -> float:
    return 0.010 + rows * 2e-4 + chunk * 5e-5 + context * 2e-8


def traffic(rng: random.Random, kind: str) -> tuple[int, int, int]:
    rows = rng.randrange(1, 65)
    if kind == "decode only":
        return rows, 0, rows * 300
    chunk = rng.choice([0, 0, 64, 512])
    return (0 if kind == "prompts only" else rows), chunk, rows * rng.randrange(50, 2000)


@pytest.mark.parametrize("kind", ["mixed", "decode only", "prompts only"])
def test_it_stays_right_for_as_long_as_it_runs(kind: str) -> None:
    rng, cost = random.Random(1), StepCost()
    worst = 1.0
    for number in range(20_000):
        step = traffic(rng, kind)
        true = seconds(*step)
        if number > 200:
            predicted = cost.predict(*step)
            worst = max(worst, predicted / true, true / max(predicted, 1e-9))
        cost.observe(*step, true * rng.uniform(0.9, 1.1))
        assert np.linalg.eigvalsh(cost._covariance).min() > 0
    assert worst < 1.5


def test_it_follows_a_machine_that_becomes_slower() -> None:
    rng, cost = random.Random(2), StepCost()
    for slowdown in (1.0, 3.0):
        for _ in range(1500):
            step = traffic(rng, "mixed")
            cost.observe(*step, slowdown * seconds(*step))
        assert cost.predict(32, 0, 9600) == pytest.approx(slowdown * seconds(32, 0, 9600), rel=0.2)


def test_chunks_are_sized_to_the_target() -> None:
    rng, cost = random.Random(3), StepCost()
    assert cost.chunk_within(0.05, 8, 2000, least=64, most=512) == 512, "nothing is known yet"
    for _ in range(500):
        step = traffic(rng, "mixed")
        cost.observe(*step, seconds(*step))
    chunk = cost.chunk_within(0.03, 8, 2000, least=64, most=512)
    assert seconds(8, chunk, 2000) == pytest.approx(0.03, rel=0.1)
    assert cost.chunk_within(0.001, 8, 2000, least=64, most=512) == 64
    assert cost.chunk_within(9.0, 8, 2000, least=64, most=512) == 512
