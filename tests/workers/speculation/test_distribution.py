"""Drafts do not bend the distribution: chi-square of what is drawn with them, against the target's own probabilities.

That tokens equal those without drafts, seed by seed, is tested elsewhere; this is the same promise from the outside,
and the only one that rejection sampling gives.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec, SpeculationSpec
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import shapes
from slipring.workers.speculation.proposer import PROPOSAL, Drafts, IntArray, NullProposer
from slipring.workers.speculation.step_costs import StepCosts
from tests.workers.runner_rig import Rig
from tests.workers.speculation.test_draft_model import with_draft_model
from tests.workers.tiny_models import save_tiny

PROMPT = [5, 3, 7, 9, 10]
LENGTH = 3
NUM_AT_ONCE, NUM_ROUNDS = 64, 16
CHAIN, TREE = [-1, 0], [-1, -1, 0, 0, 1, 1]
"""Which draft each one follows, two levels of them."""
FEW = SamplingParams(max_tokens=1, temperature=0.9, top_k=3, presence_penalty=0.4)
ALL = SamplingParams(
    max_tokens=1, temperature=0.9, top_k=6, top_p=0.85, min_p=0.12, repetition_penalty=1.2, frequency_penalty=0.3
)
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture(scope="module")
def few_tokens(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A model with so few tokens that each of them is often drawn."""
    return save_tiny("llama", tmp_path_factory.mktemp("few-tokens"), vocab_size=12)[0]


class Guesser(NullProposer):
    """Drafts tokens that are likely enough to be accepted often, and to be rejected often."""

    def __init__(self, shares: list[dict[int, float]], parents: list[int], tells: bool) -> None:
        """`shares[i]`: of the tokens at depth i; tells: what they were drawn from, too."""
        self._shares, self._parents, self._random = shares, parents, np.random.default_rng(1)
        self._tells = tells

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts, width = Drafts.none(len(rows), int(most.max(initial=0))), int(most.max(initial=0))
        drafts.num[:] = most
        proposals = np.zeros((*drafts.tokens.shape, max(map(len, self._shares))), PROPOSAL)
        for draft, parent in enumerate(self._parents[:width]):
            share = self._shares[0 if parent < 0 else 1]
            drafts.tokens[:, draft] = self._random.choice(list(share), len(rows), p=list(share.values()))
            proposals[:, draft, : len(share)] = np.array(list(share.items()), PROPOSAL)
        parents = np.tile(np.array(self._parents[:width]), (len(rows), 1))
        return Drafts(drafts.tokens, drafts.num, parents, proposals=proposals if self._tells else None)


def scores_after(rig: Rig, before: Tokens) -> NDArray[np.float64]:
    """[V]: the model's logits after PROMPT and `before`."""
    seen, inner = list[NDArray[np.float64]](), rig.model.logits
    rig.runner.model.logits = lambda hidden, at: (
        seen.append(inner(hidden, at)[-1].double().numpy()) or inner(hidden, at)
    )  # type: ignore[method-assign]
    sequence = rig.admit(PROMPT + list(before))
    rig.run([], [(sequence, len(sequence.tokens))])
    rig.runner.model.logits = inner  # type: ignore[method-assign]
    return seen[-1]


def shares_of(scores: NDArray[np.float64], params: SamplingParams, before: Tokens) -> dict[int, float]:
    """What the definitions of penalties and filters leave, written down plainly."""
    scores = scores.copy()
    for token in {*PROMPT, *before}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(before):
        scores[token] -= params.presence_penalty + params.frequency_penalty * before.count(token)
    weights = np.exp((scores - scores.max()) / params.temperature)
    kept = [int(token) for token in np.argsort(-weights) if weights[token] >= params.min_p]
    kept = kept[: params.top_k]
    mass = weights[kept] / weights[kept].sum()
    kept = [token for i, token in enumerate(kept) if mass[:i].sum() < params.top_p]
    share = weights[kept] / weights[kept].sum()
    return dict(zip(kept, share.tolist(), strict=True))


def probabilities(spec: ModelSpec, params: SamplingParams) -> dict[Tokens, float]:
    """Of every outcome of LENGTH tokens."""
    rig = Rig(spec, num_blocks=256)
    found: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*before, token): share * each
            for before, share in found.items()
            for token, each in shares_of(scores_after(rig, before), params, before).items()
        }
    return found


def marginal(expected: dict[Tokens, float], place: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for tokens, share in expected.items():
        found[tokens[place]] = found.get(tokens[place], 0.0) + share
    return found


@pytest.mark.parametrize(
    ("params", "parents", "rejection"),
    [(FEW, CHAIN, ""), (ALL, CHAIN, ""), (ALL, TREE, ""), (ALL, CHAIN, "guesser"), (FEW, CHAIN, "model")],
    ids=["few filters, chain", "all filters, chain", "all filters, tree", "rejection", "rejection, the model's own"],
)
def test_drafts_do_not_bend_the_distribution(
    spec: ModelSpec, params: SamplingParams, parents: list[int], rejection: str
) -> None:
    expected = probabilities(spec, params)
    shares = [marginal(expected, place) for place in range(1, LENGTH)]
    counts, num_accepted = dict.fromkeys(expected, 0), 0
    for round_number in range(NUM_ROUNDS):
        changes = {"max_draft": len(parents), "max_num_seqs": 64, "num_rows": 64, "max_num_batched_tokens": 512}
        if rejection == "model":  # its drafts are drawn with the noise that the target draws with
            speculation = SpeculationSpec(method="draft_model", rejection_sampling=True)
            rig, _ = with_draft_model(spec, spec, **changes, speculation=speculation)
        else:
            guesser = Guesser(shares, parents, bool(rejection))
            rig = Rig(spec, proposer=guesser, num_blocks=256, **changes)
        seeds = range(round_number * NUM_AT_ONCE, (round_number + 1) * NUM_AT_ONCE)
        sequences = [rig.admit(PROMPT, replace(params, seed=seed)) for seed in seeds]
        rig.generate(sequences, 1)
        rig.run(sequences)
        num_accepted += sum(len(sequence.outputs) > 2 for sequence in sequences)
        rig.generate(sequences, LENGTH)
        for sequence in sequences:
            counts[tuple(sequence.outputs[:LENGTH])] += 1
    total = NUM_ROUNDS * NUM_AT_ONCE
    assert total * 0.05 < num_accepted < total * 0.9, "the test needs accepted drafts, and rejected ones"
    check(counts, expected)


def check(counts: dict[Tokens, int], expected: dict[Tokens, float]) -> None:
    """By chi-square."""
    total = sum(counts.values())
    # Rare outcomes are counted together: chi-square wants a few of each.
    rare = [key for key, share in expected.items() if total * share < 5]
    groups = [[key] for key in expected if key not in rare] + ([rare] if rare else [])
    pairs = [(sum(counts[key] for key in group), total * sum(expected[key] for key in group)) for group in groups]
    chi_square, degrees = sum((count - want) ** 2 / want for count, want in pairs), len(pairs) - 1
    assert degrees > 10
    # Normal approximation of the distribution; one false alarm in thirty thousand.
    assert (chi_square - degrees) / np.sqrt(2 * degrees) < 4, (chi_square, degrees)


def bigram_head(spec: ModelSpec) -> EagleHead:
    """Guesses by the last token alone, and roughly: what the target says right behind the prompt, and noise."""
    rig = Rig(spec, num_blocks=256)
    said = torch.from_numpy(np.stack([scores_after(rig, (token,)) for token in range(spec.vocab_size)])).float()
    guessed = said + 2 * torch.randn(said.shape, generator=torch.Generator().manual_seed(1))
    weights = {name: torch.zeros(shape) for name, shape in shapes(spec, ()).items() if "norm" not in name}
    weights["fuse"][:, : spec.hidden_size] = torch.eye(spec.hidden_size)  # the embedding; its layer adds nothing
    weights["mlp_norm"] = torch.ones(spec.hidden_size)
    weights["output"] = (torch.linalg.pinv(rig.model.embedding) @ guessed).T.contiguous()
    return EagleHead(spec, weights, torch.arange(spec.vocab_size))


def test_a_head_whose_drafts_are_taken_in_part_does_not_bend_it_either(few_tokens: ModelSpec) -> None:
    """Rejection sampling counts on drafts being drawn from what the head says: the controller must not choose among
    them by what was drawn."""
    spec, params = few_tokens, FEW
    expected = probabilities(spec, params)
    speculation = SpeculationSpec(method="eagle", rejection_sampling=True)
    rig = Rig(spec, num_blocks=4096, max_draft=3, max_num_seqs=64, num_rows=64, speculation=speculation)
    runner, taken = rig.runner, list[NDArray[np.int32]]()
    target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
    # Whatever may be asked for, each draft costs something: those are left out that the head is not sure of.
    costs = StepCosts((1, 64, 256), [1.0, 1.0, 1.7])
    head = EagleProposer(target, bigram_head(spec))
    runner.proposer = controller = AdaptiveProposer(head, costs, 64, clock=lambda: 0.0)
    controller._dear.acceptance = lambda rows: np.full(len(rows), 0.95)  # type: ignore[method-assign]
    counts, accepted = dict.fromkeys(expected, 0), 0
    for round_number in range(NUM_ROUNDS):
        seeds = range(round_number * NUM_AT_ONCE, (round_number + 1) * NUM_AT_ONCE)
        sequences = [rig.admit(PROMPT, replace(params, seed=seed)) for seed in seeds]
        rig.generate(sequences, 1)
        rig.run(sequences)
        taken.append(rig.output.num_draft[:NUM_AT_ONCE].copy())
        accepted += int(rig.output.num_accepted[:NUM_AT_ONCE].sum()) - NUM_AT_ONCE
        rig.generate(sequences, LENGTH)
        for sequence in sequences:
            counts[tuple(sequence.outputs[:LENGTH])] += 1
    drafts = np.concatenate(taken)
    assert np.bincount(drafts, minlength=4)[1:].min() > 0.05 * len(drafts), "of some rows more are taken than of others"
    assert 0.2 < accepted / drafts.sum() < 0.8, "some are wrong"
    check(counts, expected)
