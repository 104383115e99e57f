"""The real Runner with drafts: whatever is proposed, the tokens and their log-probabilities are those without."""

from __future__ import annotations

import pytest

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.ngram import NgramProposer
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer, Proposer
from slipring.workers.speculation.suffix import Limits, SuffixProposer
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

NUM_OUTPUTS = 24
KINDS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_tokens=1, temperature=1.0, seed=2**63 + 12345),
    "filtered": SamplingParams(max_tokens=1, temperature=0.9, seed=3, top_k=9, top_p=0.9, min_p=0.02),
    "penalised": SamplingParams(
        max_tokens=1, temperature=0.8, seed=7, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
    ),
    "biased": SamplingParams(max_tokens=1, temperature=0.7, seed=9, logit_bias=((5, 4.0), (9, -3.0))),
    "min_tokens": SamplingParams(
        max_tokens=1, temperature=0.0, min_tokens=7, stop_token_ids=(7, 11), logit_bias=((7, 9.0), (11, 9.0))
    ),
}


class Prophet(NullProposer):
    """Knows the answers, and tells them up to a place that changes with every step."""

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = {}
        self.told: dict[int, int] = {}
        self.num_steps = 0

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.told[row] = self.told.get(row, 0) + count

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        drafts = Drafts.none(len(rows), int(most.max(initial=0)))
        self.num_steps += 1
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            begin, luck = self.told.get(row, 0), self.num_steps * 7 + row * 3
            known = self.answers.get(row, [])[begin : begin + luck % (count + 1)]
            drafts.num[i] = len(known)
            drafts.tokens[i, : len(known)] = known
            if known and luck % 3 == 0:
                drafts.tokens[i, luck % len(known)] ^= 1
        return drafts


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def prompts() -> list[list[int]]:
    return random_prompts(1, 5, 8, 16, 23, 41, 70)


def generate(spec: ModelSpec, params: SamplingParams, proposer: Proposer | None, most: int) -> list[Sequence]:
    rig = Rig(spec, proposer=proposer, max_draft=most, num_blocks=256)
    return rig.answer(prompts(), params, NUM_OUTPUTS, chunk=16)


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(spec: ModelSpec, kind: str, most: int) -> None:
    want = generate(spec, KINDS[kind], None, 0)
    prophet = Prophet()
    prophet.answers = {sequence.row: sequence.outputs for sequence in want}
    suffix = SuffixProposer(16, Limits(depth=6, factor=2.0, least_chance=0.1), max_outputs=100)
    for proposer in (prophet, NgramProposer(16, least=1, most=3), suffix):
        got = generate(spec, KINDS[kind], proposer, most)
        for sequence, reference in zip(got, want, strict=True):
            assert sequence.outputs[:NUM_OUTPUTS] == reference.outputs[:NUM_OUTPUTS]
    assert prophet.num_steps < NUM_OUTPUTS + 20


def test_log_probabilities_are_those_without_drafts(spec: ModelSpec) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.8, seed=4, logprobs=3)

    def run(proposer: Proposer | None, most: int) -> list[tuple[int, float, list[int]]]:
        rig = Rig(spec, proposer=proposer, max_draft=most, num_blocks=256)
        sequence = rig.admit(prompts()[4], params)
        found: list[tuple[int, float, list[int]]] = []
        while len(found) < 20:
            chunk = [] if sequence.outputs else [(sequence, len(sequence.tokens))]
            rig.run([sequence] if sequence.outputs else [], chunk)
            output = rig.output
            for place in range(int(output.num_accepted[0])):
                token = int(output.tokens[0, place])
                found.append((token, float(output.logprob[place]), output.top_ids[place, :3].tolist()))
        return found

    want = run(None, 0)
    prophet = Prophet()
    prophet.answers = {0: [token for token, *_ in want]}
    for (token, logprob, top), reference in zip(run(prophet, 4), want, strict=False):
        assert (token, top) == (reference[0], reference[2])
        assert logprob == pytest.approx(reference[1], abs=1e-4)


def test_nothing_is_drawn_past_the_limit(spec: ModelSpec) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.0)
    prophet = Prophet()
    want = generate(spec, GREEDY, None, 0)[2]
    prophet.answers = {0: want.outputs}
    rig = Rig(spec, proposer=prophet, max_draft=6)
    sequence = rig.admit(prompts()[2], params)
    rig.run([], [(sequence, 8)])
    for _ in range(12):  # more steps than it takes, as the engine may send them before it knows
        rig.run([sequence])
    assert sequence.outputs == want.outputs[:10]
    assert rig.output.num_accepted[0] == 0 and rig.output.header[rig.output.NUM_ROWS] == 1
