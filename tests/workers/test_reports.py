"""Log-probabilities of prompts and hidden states against transformers, and the same however a prompt is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.shm.wire import score_words
from slipring.workers import reports
from slipring.workers.runner import NON_FINITE
from tests.workers.runner_rig import GREEDY, Rig, Sequence
from tests.workers.tiny_models import FAMILIES, save_tiny

TOP = 3
SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=TOP)
ONLY_SCORED = SamplingParams(max_tokens=0, prompt_logprobs=TOP)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def prompt_of(length: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(3, 260, size=length).tolist()


def records(sequence: Sequence, top: int = TOP) -> dict[str, np.ndarray]:
    words = np.array(sequence.report, np.int32).reshape(-1, score_words(top))
    floats = words.view(np.float32)
    return {
        "logprob": floats[:, 0], "rank": words[:, 1], "ids": words[:, 2 : 2 + top], "top": floats[:, 2 + top :]
    }  # fmt: skip


def scored(spec: ModelSpec, prompt: list[int], chunk: int = 1000, params: SamplingParams = SCORED) -> Sequence:
    rig = Rig(spec)
    sequence = rig.admit(prompt, params)
    while sequence.num_computed < len(prompt):
        rig.run([], [(sequence, min(chunk, len(prompt) - sequence.num_computed))])
    return sequence


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_transformers_numbers(family: str, tmp_path: Path) -> None:
    spec, reference = save_tiny(family, tmp_path)
    prompt = prompt_of(50)
    with torch.no_grad():
        output = reference(torch.tensor([prompt]), output_hidden_states=True)
    logprobs = output.logits[0].log_softmax(1)
    found = records(scored(spec, prompt, chunk=17))
    assert len(found["logprob"]) == 49
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
    np.testing.assert_allclose(found["logprob"], expected[:, 0], atol=1e-3)
    assert found["rank"].tolist() == ((logprobs[:-1] > expected).sum(1) + 1).tolist()
    top, ids = logprobs[:-1].topk(TOP)
    assert found["ids"].tolist() == ids.tolist()
    np.testing.assert_allclose(found["top"], top, atol=1e-3)
    embedding = scored(spec, prompt, 20, SamplingParams(max_tokens=0, embedding_size=spec.hidden_size)).report
    ours = np.array(embedding, np.int32).view(np.float32)
    np.testing.assert_allclose(ours, output.hidden_states[-1][0, -1], atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
def test_a_prompt_in_chunks_reports_as_a_whole_one(
    spec: ModelSpec, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(41)
    whole, cut = records(scored(spec, prompt)), records(scored(spec, prompt, chunk))
    monkeypatch.setattr(reports, "_SLICE", 5 * spec.vocab_size)
    sliced = records(scored(spec, prompt, chunk))
    for other in (cut, sliced):
        assert other["rank"].tolist() == whole["rank"].tolist() and other["ids"].tolist() == whole["ids"].tolist()
        np.testing.assert_allclose(other["logprob"], whole["logprob"], atol=1e-4)
        np.testing.assert_allclose(other["top"], whole["top"], atol=1e-4)


def test_reporting_changes_no_token_and_neighbours_do_not_change_a_report(spec: ModelSpec) -> None:
    rig = Rig(spec)
    prompts = [prompt_of(n, n) for n in (23, 9, 30, 1)]
    embed = SamplingParams(max_tokens=0, embedding_size=spec.hidden_size)
    decoding = rig.admit(prompt_of(12))
    rig.generate([decoding], 2)
    kinds = (SCORED, embed, ONLY_SCORED, SCORED)
    together = [rig.admit(prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    rig.run([decoding], [(together[0], 20), (together[1], 9), (together[2], 30), (together[3], 1)])
    rig.run([decoding], [(together[0], 3)])
    for sequence, prompt, kind in zip(together, prompts, kinds, strict=True):
        alone = scored(spec, prompt, params=kind)
        ours, theirs = np.array(sequence.report, np.int32), np.array(alone.report, np.int32)
        np.testing.assert_allclose(ours.view(np.float32), theirs.view(np.float32), atol=1e-4)
        assert sequence.outputs == alone.outputs and len(sequence.outputs) == min(1, kind.max_tokens)
    assert together[3].report == [], "a prompt of one token has nothing to report"
    plain = Rig(spec)
    again = plain.admit(prompts[0])
    plain.generate([again], 1)
    assert together[0].outputs == again.outputs


def test_a_likeliest_token_has_the_very_number_of_its_alternative(spec: ModelSpec) -> None:
    rig = Rig(spec)
    sequence = rig.admit(prompt_of(4))
    rig.generate([sequence], 20)
    found = records(scored(spec, sequence.tokens))
    likeliest = found["rank"] == 1
    assert likeliest.sum() >= 20 and (found["logprob"][likeliest] == found["top"][likeliest, 0]).all()


def test_readmission_reports_the_prompt_alone(spec: ModelSpec) -> None:
    prompt = prompt_of(20)
    rig = Rig(spec)
    again = rig.admit(prompt, SCORED, outputs=[5, 6, 7])
    rig.run([], [(again, 23)])
    np.testing.assert_allclose(records(again)["logprob"], records(scored(spec, prompt))["logprob"], atol=1e-4)


def test_a_report_that_holds_no_numbers_fails_its_entry_alone(spec: ModelSpec) -> None:
    rig = Rig(spec)
    rig.model.embedding[50] = float("nan")
    embed = SamplingParams(max_tokens=0, embedding_size=spec.hidden_size)
    rows = [rig.admit([50, 4, 5], ONLY_SCORED), rig.admit([50, 4], embed), rig.admit(prompt_of(9), ONLY_SCORED)]
    rig.run([], [(row, len(row.tokens)) for row in rows])
    assert rig.output.num_accepted[:3].tolist() == [NON_FINITE, NON_FINITE, 0]


def test_a_step_without_reports_has_none(spec: ModelSpec) -> None:
    rig = Rig(spec)
    sequence = rig.admit(prompt_of(9), GREEDY)
    rig.run([], [(sequence, 9)])
    assert rig.output.header[rig.output.NUM_REPORTED] == 0 and sequence.report == []
