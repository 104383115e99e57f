"""The CUDA worker's code path, its kernels interpreted, gives the CPU worker's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.shm.wire import NO_TOKEN, NON_FINITE
from tests.kernels.on_gpu import GpuRig
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

SEEDED = SamplingParams(max_tokens=1, temperature=1.0, seed=2**63 + 12345)
FILTERED = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=7, choice=1)
EDITED = SamplingParams(
    max_tokens=1,
    temperature=0.9,
    seed=3,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((9, 2.0), (11, -3.0)),
    min_tokens=3,
    stop_token_ids=(7, 9),
    logprobs=3,
)
MASKED = SamplingParams(
    max_tokens=1, seed=5, allowed_token_ids=(5, 6, 7, 8, 9), bad_words=((5,), (6, 7), (7, 6, 7), (8, 8))
)
MIXED = [GREEDY, SEEDED, FILTERED, EDITED]
SMALL: dict[str, object] = {"max_num_seqs": 5, "num_rows": 9}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def prompts() -> list[list[int]]:
    return random_prompts(1, 8, 21, 13)


def test_interpreted_kernels_are_what_runs(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests below would compare the references with themselves."""
    from slipring.kernels import paged_decode, paged_prefill, rmsnorm, rope_store_kv, row_state, silu_mul

    refs = [(paged_decode, "paged_decode_ref"), (paged_prefill, "paged_prefill_ref"), (silu_mul, "silu_mul_ref")]
    refs += [(rope_store_kv, "rope_store_kv_ref"), (rmsnorm, "rmsnorm_ref"), (row_state, "commit_tokens_ref")]
    for module, name in refs:
        monkeypatch.setattr(module, name, None)
    rig = GpuRig(spec, **SMALL)
    sequence = rig.admit(prompts()[1])
    rig.generate([sequence], 2)
    assert len(sequence.outputs) == 2


def run_a_day(rig: Rig) -> list[list[int]]:
    """Arrivals one by one, chunked prompts beside decoding rows, block appends, a preempted row that comes back."""
    running: list[Sequence] = []
    for prompt, params in zip(prompts(), MIXED, strict=True):
        running.append(rig.admit(prompt, params))
        rig.generate(running, max(len(s.outputs) for s in running) + 1, chunk=9)
    if isinstance(rig, GpuRig):
        rig.runner.capture_all()
    for _ in range(3):
        rig.run(running)
    preempted = running.pop(1)
    rig.run(running)
    again = rig.admit(prompts()[1], MIXED[1], outputs=preempted.outputs)
    rig.run(running, [(again, 7)])
    rig.generate([again], 1, chunk=20)
    for _ in range(2):
        rig.run([*running, again])
    return [s.outputs for s in [*running, preempted, again]]


def test_tokens_equal_those_of_the_cpu_worker(spec: ModelSpec) -> None:
    """Greedy, seeded, filtered and edited rows side by side; the second half decodes by replayed graphs."""
    assert run_a_day(GpuRig(spec, **SMALL)) == run_a_day(Rig(spec, **SMALL))


def test_logprobs_equal_those_of_the_cpu_worker(spec: ModelSpec) -> None:
    outputs = []
    for rig in (GpuRig(spec, **SMALL), Rig(spec, **SMALL)):
        asking, other = rig.admit(prompts()[2], EDITED), rig.admit(prompts()[3])
        rig.run([], [(other, 13), (asking, 21)])
        rig.run([other, asking])
        outputs.append(rig.output)
    ours, theirs = outputs
    for name in ("num_accepted", "tokens", "rank", "top_ids", "rows", "generation"):
        assert (getattr(ours, name)[:2] == getattr(theirs, name)[:2]).all(), name
    np.testing.assert_allclose(ours.logprob[1], theirs.logprob[1], atol=1e-4)
    np.testing.assert_allclose(ours.top_logprobs[1, :3], theirs.top_logprobs[1, :3], atol=1e-4)
    assert ours.header[ours.NUM_LOGPROBS] == 3 and ours.times_ns[ours.FORWARD] > 0


def test_masked_rows_draw_the_cpu_workers_tokens(spec: ModelSpec) -> None:
    outputs = []
    for rig in (GpuRig(spec, **SMALL), Rig(spec, **SMALL)):
        first = rig.admit(prompts()[1], MASKED)
        rig.generate([first], 8)
        again = rig.admit(prompts()[1], MASKED, outputs=first.outputs)
        rig.generate([again], 6)
        outputs.append(first.outputs + again.outputs)
    assert outputs[0] == outputs[1] and set(outputs[0]) <= {6, 7, 8, 9}


def test_reports_equal_those_of_the_cpu_worker(spec: ModelSpec) -> None:
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    embed = SamplingParams(max_tokens=0, embedding_size=spec.hidden_size)
    reports = []
    for rig in (GpuRig(spec, **SMALL), Rig(spec, **SMALL)):
        decoding = rig.admit(prompts()[0])
        rig.generate([decoding], 1)
        rows = [rig.admit(prompts()[2], scored), rig.admit(prompts()[3], embed)]
        rig.run([decoding], [(rows[0], 9), (rows[1], 13)])
        rig.run([decoding], [(rows[0], 12)])
        reports.append([np.array(row.report, np.int32) for row in rows])
        assert len(rows[0].outputs) == 1 and rows[1].outputs == []
    (ours, our_state), (theirs, their_state) = reports
    np.testing.assert_allclose(our_state.view(np.float32), their_state.view(np.float32), atol=1e-4)
    ours, theirs = ours.reshape(20, 6), theirs.reshape(20, 6)
    assert (ours[:, 1:4] == theirs[:, 1:4]).all(), "ranks and ids"
    for column in (0, 4, 5):
        np.testing.assert_allclose(ours.view(np.float32)[:, column], theirs.view(np.float32)[:, column], atol=1e-4)


def test_a_failed_row_harms_nobody(spec: ModelSpec) -> None:
    rig, expected = GpuRig(spec, **SMALL), Rig(spec, **SMALL)
    rig.model.embedding[50] = float("nan")
    nothing = SamplingParams(max_tokens=9, temperature=0.0, allowed_token_ids=(7,), bad_words=((7,),))
    bad, good = rig.admit([50, 4, 5]), rig.admit(prompts()[3])
    rig.run([], [(bad, 3), (good, 13)])
    assert rig.output.num_accepted[:2].tolist() == [NON_FINITE, 1]
    rows = [rig.admit([50, 4, 5], nothing), rig.admit([4, 5, 6], nothing), rig.admit([5, 4, 6])]
    rig.run([], [(row, 3) for row in rows])
    assert rig.output.num_accepted[:3].tolist() == [NON_FINITE, NO_TOKEN, 1]
    rig.kv._all.fill_(float("nan"))  # what a failed row may leave behind, in every block
    fresh, theirs = rig.admit(prompts()[2]), expected.admit(prompts()[2])
    rig.generate([fresh], 4, chunk=9)
    expected.generate([theirs], 4, chunk=9)
    assert fresh.outputs == theirs.outputs


def test_qwen3_norms_its_heads(tmp_path: Any) -> None:
    spec, _ = save_tiny("qwen3", tmp_path)
    outputs = []
    for rig in (GpuRig(spec, **SMALL), Rig(spec, **SMALL)):
        sequence = rig.admit(prompts()[2])
        rig.generate([sequence], 3)
        outputs.append(sequence.outputs)
    assert outputs[0] == outputs[1]
