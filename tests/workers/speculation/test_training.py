"""A head that is trained on a model's own words guesses them, and the served one is as good as its report says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipring.shm.spec import DraftTraining, ModelSpec, TrainingReport
from slipring.workers.speculation import training, training_texts
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.head_files import load_head
from slipring.workers.speculation.training import Trainer
from tests.workers.runner_rig import Rig, Sequence
from tests.workers.tiny_models import save_tiny

NUM_OUTPUTS = 24


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def write(spec: ModelSpec, num_outputs: int, rig: Rig | None = None) -> tuple[Rig, list[Sequence]]:
    rig, random = rig or Rig(spec, num_blocks=512), np.random.default_rng(3)
    sequences = [rig.admit(random.integers(3, 260, size=int(size)).tolist()) for size in random.integers(2, 20, 4)]
    rig.generate(sequences, num_outputs)
    return rig, sequences


def test_a_trained_head_is_right_more_often_than_not(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (training, training_texts):
        monkeypatch.setattr(module, "CONTEXT", 100)
    torch.manual_seed(1)
    _, sequences = write(spec, NUM_OUTPUTS)
    reports: list[TrainingReport] = []
    trainer = Trainer(
        DraftTraining(
            model=spec,
            written=[sequence.tokens for sequence in sequences],
            prompts=[len(sequence.tokens) - len(sequence.outputs) for sequence in sequences],
            greedy=[True] * len(sequences),
            output=str(tmp_path / "head"),
            epochs=200,
            vocab_size=10_000,
            seed=1,
            num_threads=1,
        ),
        reports.append,
    )
    texts = trainer.held + trainer._learnt
    before = trainer.accepted(texts)
    report = trainer.run()
    learnt = trainer.accepted(texts, 3)
    assert report.final and len(report.accepted) == 5
    assert {each.phase for each in reports} == {"read", "train"}
    assert learnt[0] > 0.4 and sum(learnt) > max(0.6, sum(before[:3])), (before, learnt)
    assert torch.equal(load_head(tmp_path / "head", spec, 128).token_ids, trainer.token_ids)
    assert_served(spec, tmp_path / "head", sequences, 1 + sum(learnt))


def assert_served(spec: ModelSpec, head: Path, sequences: list[Sequence], mean_length: float) -> None:
    """The same texts through a Runner that drafts with the head: the same tokens, in as few steps as told."""
    rig = Rig(spec, num_blocks=512, max_draft=3)
    runner = rig.runner
    target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
    runner.proposer = EagleProposer(target, load_head(head, spec, 128))
    num_steps = 0
    for reference in sequences:
        prompt = reference.tokens[: -len(reference.outputs)]
        sequence = rig.admit(prompt)
        while len(sequence.outputs) < NUM_OUTPUTS:
            begun = bool(sequence.outputs)
            rig.run([sequence] if begun else [], [] if begun else [(sequence, len(prompt))])
            num_steps += begun
        assert sequence.outputs[:NUM_OUTPUTS] == reference.outputs
    # What is served is rounded to int8.
    assert len(sequences) * (NUM_OUTPUTS - 1) / num_steps > max(1.2, 0.9 * mean_length)
