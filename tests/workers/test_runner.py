"""The real Runner on a tiny model: whatever way tokens are cut into steps and batches, they come out the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.shm.wire import NON_FINITE
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

SEEDED = SamplingParams(max_tokens=1, temperature=1.0, seed=2**63 + 12345)
PENALISED = SamplingParams(
    max_tokens=1, temperature=0.8, top_p=0.9, top_k=40, seed=7, repetition_penalty=1.3, frequency_penalty=0.4
)
MIXED = [GREEDY, SEEDED, PENALISED, SamplingParams(max_tokens=1, min_p=0.05, seed=3, presence_penalty=0.5)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def prompts() -> list[list[int]]:
    return random_prompts(1, 5, 8, 16, 23, 41, 70)


def alone(spec: ModelSpec, prompt: list[int], params: SamplingParams, num_outputs: int) -> list[int]:
    rig = Rig(spec)
    sequence = rig.admit(prompt, params)
    rig.generate([sequence], num_outputs)
    return sequence.outputs


@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
def test_a_prompt_in_chunks_equals_a_whole_one(spec: ModelSpec, chunk: int) -> None:
    prompt = prompts()[5]
    rig = Rig(spec)
    sequence = rig.admit(prompt)
    rig.generate([sequence], 6, chunk=chunk)
    assert sequence.outputs == alone(spec, prompt, GREEDY, 6)


@pytest.mark.parametrize("params", MIXED, ids=["greedy", "seeded", "penalised", "min_p"])
def test_a_batch_equals_each_alone(spec: ModelSpec, params: SamplingParams) -> None:
    rig = Rig(spec)
    sequences = [rig.admit(prompt, params) for prompt in prompts()]
    rig.generate(sequences, 20, chunk=16)
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        assert sequence.outputs == alone(spec, prompt, params, 20)


def test_a_mixed_batch_with_arrivals_equals_each_alone(spec: ModelSpec) -> None:
    rig = Rig(spec)
    running: list[Sequence] = []
    for i, prompt in enumerate(prompts()):
        running.append(rig.admit(prompt, MIXED[i % len(MIXED)]))
        rig.generate(running, max(len(s.outputs) for s in running) + 2, chunk=9)
    rig.generate(running, 16)
    for i, (sequence, prompt) in enumerate(zip(running, prompts(), strict=True)):
        assert sequence.outputs[:16] == alone(spec, prompt, MIXED[i % len(MIXED)], 16)


@pytest.mark.parametrize("params", MIXED, ids=["greedy", "seeded", "penalised", "min_p"])
def test_a_readmitted_row_goes_on_as_if_nothing_had_happened(spec: ModelSpec, params: SamplingParams) -> None:
    prompt = prompts()[4]
    expected = alone(spec, prompt, params, 20)
    rig = Rig(spec)
    first = rig.admit(prompt, params)
    rig.generate([first], 9)
    again = rig.admit(prompt, params, outputs=first.outputs)
    rig.generate([again], 11, chunk=7)
    assert first.outputs + again.outputs == expected


def test_decoding_equals_full_recomputation(spec: ModelSpec) -> None:
    prompt = prompts()[3]
    outputs = alone(spec, prompt, GREEDY, 12)
    for i in range(12):
        assert alone(spec, prompt + outputs[:i], GREEDY, 1) == [outputs[i]]


def test_the_engine_may_be_a_step_behind(spec: ModelSpec) -> None:
    """A decode step never reads the table's token ids: the worker's own last token is the input."""
    rig = Rig(spec)
    sequence = rig.admit(prompts()[2])
    rig.generate([sequence], 1)
    rig.table.token_ids[sequence.row] = 77
    rig.generate([sequence], 8)
    assert sequence.outputs == alone(spec, prompts()[2], GREEDY, 8)


def test_a_step_without_sampled_rows_draws_nothing(spec: ModelSpec) -> None:
    rig = Rig(spec)
    sequence = rig.admit(prompts()[5])
    rig.run([], [(sequence, 10)])
    output = rig.output
    assert output.header[output.NUM_ROWS] == 1 and output.num_accepted[0] == 0
    assert output.rows[0] == sequence.row and output.generation[0] == 1
    assert output.times_ns[output.FORWARD] > 0


def test_logprobs_are_those_of_the_raw_distribution(spec: ModelSpec) -> None:
    rig = Rig(spec)
    wanted = SamplingParams(max_tokens=1, temperature=2.0, seed=5, logprobs=4, logit_bias=((9, 50.0),))
    asking, other = rig.admit(prompts()[3], wanted), rig.admit(prompts()[4])
    rig.run([], [(other, 23), (asking, 16)])
    output = rig.output
    assert asking.outputs == [9], "the bias decides the token"
    assert output.header[output.NUM_LOGPROBS] == 4
    top = output.top_logprobs[1, :4]
    assert (np.diff(top) <= 0).all() and (top < 0).all()
    assert output.rank[1] > 4, "the bias shows neither in the rank"
    assert output.logprob[1] < top[-1], "nor in the log-probability"


def test_min_tokens_keeps_stop_ids_out(spec: ModelSpec) -> None:
    rig = Rig(spec)
    bias = tuple((token, 100.0) for token in (7, 11))
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=3, stop_token_ids=(7, 11), logit_bias=bias)
    sequence = rig.admit(prompts()[1], params)
    rig.generate([sequence], 5)
    assert not {7, 11} & set(sequence.outputs[:3])
    assert set(sequence.outputs[3:]) <= {7, 11}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_failed_row_harms_neither_neighbours_nor_the_next_owner_of_its_blocks(spec: ModelSpec, poison: float) -> None:
    rig = Rig(spec)
    clean_embedding = rig.model.embedding[50].clone()
    rig.model.embedding[50] = poison
    bad, good = rig.admit([50, 4, 5]), rig.admit(prompts()[4])
    rig.run([], [(bad, 3), (good, 23)])
    assert rig.output.num_accepted[:2].tolist() == [NON_FINITE, 1]
    rig.model.embedding[50] = clean_embedding
    rig.kv._all.fill_(float("nan"))  # what a failed row may leave behind, in every block
    fresh = [rig.admit(prompt) for prompt in prompts()[:5]]
    rig.generate(fresh, 12, chunk=5)
    for sequence, prompt in zip(fresh, prompts(), strict=False):
        assert sequence.outputs == alone(spec, prompt, GREEDY, 12)


def test_a_step_for_an_unknown_admission_is_refused(spec: ModelSpec) -> None:
    rig = Rig(spec)
    sequence = rig.admit(prompts()[3])
    sequence.new = False
    with pytest.raises(RuntimeError, match="generation"):
        rig.run([], [(sequence, 16)])


def test_warm_up_leaves_no_trace(spec: ModelSpec) -> None:
    rig = Rig(spec)
    rig.runner.warm_up()
    sequence = rig.admit(prompts()[3], SEEDED)
    rig.generate([sequence], 8)
    assert sequence.outputs == alone(spec, prompts()[3], SEEDED, 8)
    with torch.inference_mode():
        assert torch.isfinite(rig.kv._all).all()
