"""Rejection sampling inside the real Runner. That its tokens are distributed like the target's: `test_distribution`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec, SpeculationSpec
from slipring.workers.sampler import DrawnDrafts, Places
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import load_head, save_head, shapes
from slipring.workers.speculation.proposer import PROPOSAL
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

SEEDED = SamplingParams(max_tokens=1, temperature=0.7, seed=11, logprobs=0)
ON = SpeculationSpec(method="eagle", rejection_sampling=True)
NUM_OUTPUTS, NUM_DRAWS = 16, 4000


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture(scope="module")
def head(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, generator = tmp_path_factory.mktemp("head"), torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes(spec, ()).items()}
    save_head(path, EagleHead(spec, weights, torch.arange(3, spec.vocab_size - 2), ()), {})
    return path


def with_head(spec: ModelSpec, head: Path) -> Rig:
    rig = Rig(spec, max_draft=3, num_blocks=256, speculation=ON)
    runner = rig.runner
    target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
    runner.proposer = EagleProposer(target, load_head(head, spec, 128))
    return rig


def generate(rig: Rig) -> list[Sequence]:
    """Greedy rows beside sampled ones, with the same prompts."""
    sequences = [rig.admit(prompt, params) for prompt in random_prompts(5, 8, 23) for params in (GREEDY, SEEDED)]
    rig.generate(sequences, NUM_OUTPUTS)
    return sequences


def test_greedy_rows_are_not_touched_and_the_same_drafts_give_the_same_tokens(spec: ModelSpec, head: Path) -> None:
    want = [sequence.outputs[:NUM_OUTPUTS] for sequence in generate(Rig(spec, num_blocks=256))]
    got, again = ([each.outputs[:NUM_OUTPUTS] for each in generate(with_head(spec, head))] for _ in range(2))
    assert got == again
    assert got[::2] == want[::2]
    assert got[1::2] != want[1::2], "the drafts of a random head were all accepted"


def test_what_a_draft_is_worth_says_nothing_of_what_was_drawn(spec: ModelSpec, head: Path) -> None:
    rig = with_head(spec, head)
    greedy, *sampled = [
        rig.admit(random_prompts(8)[0], SamplingParams(max_tokens=1, temperature=temperature, seed=seed, top_k=1))
        for seed, temperature in enumerate((0.0, 0.7, 0.7, 0.7))
    ]
    rig.generate([greedy, *sampled], 1)  # top_k makes the first token the same one; drafts know of no such filter
    rows = np.array([each.row for each in (greedy, *sampled)])
    rig.runner.proposer.catch_up(rows)
    drafts = rig.runner.proposer.propose(rows, np.full(4, 3))
    assert drafts.worth is not None and drafts.proposals is not None and drafts.parents is None
    assert len({tuple(tokens) for tokens in drafts.tokens[1:].tolist()}) > 1
    assert np.ptp(drafts.worth[1:], axis=0).max() < 1e-6
    assert not drafts.proposals["chance"][0].any()
    assert drafts.proposals["chance"][1:].sum(2) == pytest.approx(1.0, abs=1e-5)


@torch.inference_mode()
def test_drafts_are_drawn_from_what_they_are_said_to_be_drawn_from(spec: ModelSpec) -> None:
    rig = Rig(spec, speculation=ON)
    row, position = np.full(NUM_DRAWS, rig.admit([5, 6, 7], SEEDED).row), np.arange(NUM_DRAWS)
    rig.runner.sampler.admit(int(row[0]))
    scores = torch.randn(1, spec.vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    guesses = rig.runner.sampler.guesses(
        scores.expand(NUM_DRAWS, -1).contiguous(), torch.arange(spec.vocab_size), row, position
    )
    assert guesses.proposals is not None
    said, want = guesses.proposals["token_id"][0], guesses.proposals["chance"][0] * NUM_DRAWS
    count = np.bincount(guesses.at[:, 0].numpy(), minlength=spec.vocab_size)
    assert count[said].sum() == NUM_DRAWS and want.min() > 5
    chi_square, degrees = ((count[said] - want) ** 2 / want).sum(), len(said) - 1
    assert (chi_square - degrees) / np.sqrt(2 * degrees) < 4


@torch.inference_mode()
def test_log_probabilities_are_the_targets(spec: ModelSpec) -> None:
    rig = Rig(spec, speculation=ON)
    rows = np.full(200, rig.admit([5, 6, 7], SEEDED).row)
    rig.runner.sampler.admit(int(rows[0]))
    logits = torch.randn(200, spec.vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    at = np.arange(0, 200, 2)  # the other places have no drafts
    proposals = np.zeros((100, 2), PROPOSAL)
    proposals["token_id"], proposals["chance"] = logits.topk(2).indices[at].numpy(), 0.5
    places = Places(rows, np.arange(200), np.zeros(200, np.int64), np.zeros(200, np.int64))
    plain = rig.runner.sampler.sample(logits.clone(), places)
    drafts = DrawnDrafts(at, proposals["token_id"][:, 0].copy(), proposals)
    found = rig.runner.sampler.sample(logits.clone(), replace(places, drawn=drafts))
    assert (found.tokens[1::2] == plain.tokens[1::2]).all()
    accepted = (found.tokens[at] == drafts.tokens).mean()
    assert 0.1 < accepted < 0.9
    assert found.logprobs is not None
    want = logits.log_softmax(1).gather(1, torch.from_numpy(found.tokens).unsqueeze(1)).squeeze(1)
    assert found.logprobs.logprob == pytest.approx(want.numpy(), abs=1e-5)
