"""A head that is trained on a model's own words guesses them, and the served one is as good as its report says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from slipring.shm.spec import DraftTraining, ModelSpec, TrainingReport
from slipring.workers.speculation import trainer as trainer_module
from slipring.workers.speculation import training_texts
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.eagle_training import EagleTrainer
from slipring.workers.speculation.head_files import load_head, save_head, shapes
from slipring.workers.speculation.medusa import MedusaProposer
from slipring.workers.speculation.medusa_head import load_medusa
from slipring.workers.speculation.medusa_training import MedusaTrainer
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


def draft_training(spec: ModelSpec, method: str, sequences: list[Sequence], output: Path, epochs: int) -> DraftTraining:
    return DraftTraining(
        method=method,
        model=spec,
        written=[sequence.tokens for sequence in sequences],
        prompts=[len(sequence.tokens) - len(sequence.outputs) for sequence in sequences],
        greedy=[True] * len(sequences),
        output=str(output),
        epochs=epochs,
        vocab_size=10_000,
        seed=1,
        num_threads=1,
    )


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_trained_head_is_right_more_often_than_not(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for module in (trainer_module, training_texts):
        monkeypatch.setattr(module, "CONTEXT", 100)
    torch.manual_seed(1)
    _, sequences = write(spec, NUM_OUTPUTS)
    reports: list[TrainingReport] = []
    head = tmp_path / "head"
    kind = {"eagle": EagleTrainer, "medusa": MedusaTrainer}[method]
    trainer = kind(draft_training(spec, method, sequences, head, 200), reports.append)
    texts = trainer.held + trainer.learnt
    before = trainer.accepted(texts)
    report = trainer.run()
    learnt = trainer.accepted(texts, 3)
    assert report.final and len(report.accepted) == 5
    assert {each.phase for each in reports} == {"read", "train"}
    assert learnt[0] > 0.3 and sum(learnt) > max(0.6, sum(before[:3])), (before, learnt)
    load = {"eagle": lambda: load_head(head, spec, 128), "medusa": lambda: load_medusa(head, spec)}[method]
    assert torch.equal(load().token_ids, trainer.token_ids)
    assert_served(spec, method, head, sequences, 1 + sum(learnt))
    if method == "eagle":
        again = msgspec.structs.replace(trainer.training, start=str(head), vocab_size=20)
        resumed = EagleTrainer(again, reports.append)
        assert torch.equal(resumed.token_ids, trainer.token_ids), "a head goes on with its own vocabulary"
        assert sum(resumed.accepted(texts, 3)) > 0.9 * sum(learnt)


def test_a_head_to_go_on_with_must_be_ours(spec: ModelSpec, tmp_path: Path) -> None:
    _, sequences = write(spec, 4)
    head = tmp_path / "head"
    weights = {name: torch.zeros(shape) for name, shape in shapes(spec).items()}
    save_head(head, EagleHead(spec, weights, torch.arange(9)), {})
    training = draft_training(spec, "eagle", sequences, tmp_path / "new", 1)
    with pytest.raises(ValueError, match="another design"):
        EagleTrainer(msgspec.structs.replace(training, start=str(head)), lambda report: None)


def assert_served(spec: ModelSpec, method: str, head: Path, sequences: list[Sequence], mean_length: float) -> None:
    """The same texts through a Runner that drafts with the head: the same tokens, in as few steps as told."""
    rig = Rig(spec, num_blocks=512, max_draft=3)
    runner = rig.runner
    if method == "eagle":
        target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
        runner.proposer = EagleProposer(target, load_head(head, spec, 128))
    else:
        runner.proposer = MedusaProposer(rig.model, runner.rows, runner.sampler, load_medusa(head, spec))
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
