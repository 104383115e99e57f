"""Drafts do not bend the distribution: chi-square of what is drawn with them, against the target's own probabilities.

That tokens equal those without drafts, seed by seed, is tested elsewhere; this is the same promise from the outside.
"""

from __future__ import annotations

import numpy as np
import pytest

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from tests.workers.runner_rig import Rig
from tests.workers.tiny_models import save_tiny

PROMPT = [5, 17, 42, 9, 100]
TOP_K, TEMPERATURE, PRESENCE = 3, 0.9, 0.4
LENGTH = 3
NUM_AT_ONCE, NUM_ROUNDS = 64, 16
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


class Guesser(NullProposer):
    """Drafts tokens that are likely enough to be accepted often, and to be rejected often."""

    def __init__(self, shares: list[dict[int, float]]) -> None:
        """`shares[i]`: of the tokens at a chain's place i."""
        self._shares, self._random = shares, np.random.default_rng(1)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        drafts.num[:] = most
        for place, share in enumerate(self._shares[: drafts.tokens.shape[1]]):
            drafts.tokens[:, place] = self._random.choice(list(share), len(rows), p=list(share.values()))
        return drafts


def top_three(spec: ModelSpec, before: Tokens) -> dict[int, float]:
    """The target's probabilities after PROMPT and `before`: penalty, temperature, then the best three."""
    rig = Rig(spec)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    sequence = rig.admit(PROMPT + list(before), params)
    rig.run([], [(sequence, len(sequence.tokens))])
    ids, logprobs = rig.output.top_ids[0].tolist(), rig.output.top_logprobs[0]
    scores = {i: float(p) - PRESENCE * (i in before) for i, p in zip(ids, logprobs, strict=True)}
    best = sorted(scores, key=lambda token: -scores[token])[:TOP_K]
    weights = np.exp(np.array([scores[token] for token in best]) / TEMPERATURE)
    return dict(zip(best, (weights / weights.sum()).tolist(), strict=True))


def probabilities(spec: ModelSpec) -> dict[Tokens, float]:
    """Of every outcome of LENGTH tokens."""
    found: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*before, token): share * each
            for before, share in found.items()
            for token, each in top_three(spec, before).items()
        }
    return found


def marginal(expected: dict[Tokens, float], place: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for tokens, share in expected.items():
        found[tokens[place]] = found.get(tokens[place], 0.0) + share
    return found


def test_drafts_do_not_bend_the_distribution(spec: ModelSpec) -> None:
    expected = probabilities(spec)
    shares = [marginal(expected, place) for place in range(1, LENGTH)]
    counts, num_accepted = dict.fromkeys(expected, 0), 0
    for round_number in range(NUM_ROUNDS):
        rig = Rig(spec, proposer=Guesser(shares), max_draft=LENGTH - 1, max_num_seqs=64, num_rows=64, num_blocks=256,
                  max_num_batched_tokens=512)  # fmt: skip
        sequences = [
            rig.admit(
                PROMPT,
                SamplingParams(
                    max_tokens=1, temperature=TEMPERATURE, top_k=TOP_K, presence_penalty=PRESENCE,
                    seed=round_number * NUM_AT_ONCE + i,
                ),
            )
            for i in range(NUM_AT_ONCE)
        ]  # fmt: skip
        rig.generate(sequences, 1)
        rig.run(sequences)
        num_accepted += sum(len(sequence.outputs) > 2 for sequence in sequences)
        rig.generate(sequences, LENGTH)
        for sequence in sequences:
            counts[tuple(sequence.outputs[:LENGTH])] += 1
    total = NUM_ROUNDS * NUM_AT_ONCE
    assert total * 0.05 < num_accepted < total * 0.9, "the test needs accepted drafts, and rejected ones"
    chi_square = sum((counts[key] - total * share) ** 2 / (total * share) for key, share in expected.items())
    degrees = len(expected) - 1
    # Normal approximation of the distribution; one false alarm in thirty thousand.
    assert (chi_square - degrees) / np.sqrt(2 * degrees) < 4, (chi_square, degrees)
