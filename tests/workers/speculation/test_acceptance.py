"""Chains are counted as a server takes them: one step after the other, not from each position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipring.workers.speculation.acceptance import served_chains, shares


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=30), st.integers(0, 5))
def test_steps_are_those_of_a_plain_walk(right: list[list[bool]], begin: int) -> None:
    expected, at = [], begin
    while at < len(right):
        accepted = 0
        while accepted < 3 and right[at][accepted] and at + accepted < len(right):
            accepted += 1
        expected.append(accepted)
        at += accepted + 1
    steps = served_chains(np.array(right), begin)
    assert steps.tolist() == expected
    mean = 1 + sum(expected) / len(expected) if expected else 1.0
    assert abs(1 + sum(shares(steps, 3)) - mean) < 1e-3


def test_easy_stretches_take_few_steps() -> None:
    right = np.zeros((16, 3), bool)
    right[:8] = True
    assert served_chains(right, 0).tolist() == [3, 3] + [0] * 8
