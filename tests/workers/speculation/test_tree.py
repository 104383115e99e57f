"""Draft trees in the real Runner: their shape, the walk through them, and the cache that they leave behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slipring.kernels.spec_verify import verify_tree_ref
from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.entries import Entries
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.tree import branches_of, depths, lineage
from slipring.workers.speculation.verify import verify
from tests.workers.runner_rig import GREEDY, Rig, Sequence
from tests.workers.speculation.test_chain import KINDS, NUM_OUTPUTS, prompts
from tests.workers.tiny_models import save_tiny

LOGPROBS = SamplingParams(max_tokens=1, temperature=0.8, seed=4, logprobs=3)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture(scope="module")
def sampling_rig(spec: ModelSpec) -> Rig:
    rig = Rig(spec, max_draft=12)
    for _ in range(4):
        rig.admit([5, 6, 7])
        rig.runner.sampler.admit(rig._next_row - 1)
    return rig


class Oracle(NullProposer):
    """Knows the answers, and hides some of them in trees of wrong guesses."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers
        self._told: dict[int, int] = {}
        self._random = np.random.default_rng(8)
        self.num_steps = self.num_forks = 0

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._told[row] = self._told.get(row, 0) + count

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        width = int(most.max(initial=0))
        tokens, parents = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), -1, np.int64)
        self.num_steps += 1
        for i, (row, count) in enumerate(zip(rows.tolist(), most.tolist(), strict=True)):
            known, right = self.answers.get(row, [])[self._told.get(row, 0) :], [-1]
            for draft in range(count):
                if len(right) <= len(known) and self._random.random() < 0.5:
                    tokens[i, draft], parents[i, draft] = known[len(right) - 1], right[-1]
                    right.append(draft)
                else:
                    tokens[i, draft], parents[i, draft] = (
                        self._random.integers(3, 260),
                        self._random.integers(-1, draft),
                    )
            self.num_forks += int((parents[i] != np.arange(-1, width - 1)).any())
        return Drafts(tokens, most.copy(), parents)


def generate(
    spec: ModelSpec, params: SamplingParams, proposer: NullProposer, most: int, size: int
) -> tuple[Rig, list[Sequence]]:
    rig = Rig(spec, proposer=proposer, max_draft=most, num_blocks=1024 // size * 2, block_size=size)
    return rig, rig.answer(prompts(), params, NUM_OUTPUTS, chunk=16)


def cached(rig: Rig, sequence: Sequence, num: int) -> torch.Tensor:
    """[layers, 2, num, ...]: the row's keys and values."""
    size, position = rig.config.block_size, np.arange(num)
    slots = torch.from_numpy(np.array(sequence.blocks)[position // size] * size + position % size)
    return rig.kv._all.flatten(2, 3).index_select(2, slots)


def test_shapes() -> None:
    parents = np.array([[-1, -1, 0, 0, 2, 1], [-1, 0, 1, 2, 3, 4]])
    assert depths(parents).tolist() == [[0, 1, 1, 2, 2, 3, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert [f"{bits:07b}" for bits in lineage(parents)[0]] == [
        "0000001", "0000011", "0000101", "0001011", "0010011", "0101011", "1000101",
    ]  # fmt: skip
    assert lineage(parents)[1].tolist() == [2 ** (i + 1) - 1 for i in range(7)]


def test_a_tree_that_is_cut_down_to_chains_is_one() -> None:
    drafts = Drafts(np.arange(8).reshape(2, 4), np.array([4, 4]), np.array([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    assert drafts.first(np.array([3, 4])).parents is not None
    cut = drafts.first(np.array([2, 4]))
    assert cut.parents is None and branches_of(np.array([1, 1]), cut) is None
    assert cut.follows.tolist() == [[-1, 0, 1, 2]] * 2


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(0, 12), num_rows=st.integers(1, 4))
def test_a_walk_goes_where_the_slow_one_goes(sampling_rig: Rig, data: st.DataObject, width: int, num_rows: int) -> None:
    few = st.integers(3, 5)  # tokens that meet each other often
    num = np.array([data.draw(st.integers(0, width)) for _ in range(num_rows)])
    tokens = np.array([[data.draw(few) for _ in range(width)] for _ in range(num_rows)]).reshape(num_rows, width)
    parents = np.array([[data.draw(st.integers(-1, i - 1)) for i in range(width)] for _ in range(num_rows)])
    parents = parents.reshape(num_rows, width).astype(np.int64)
    targets = np.array([[data.draw(few) for _ in range(width + 1)] for _ in range(num_rows)])
    drafts = Drafts(tokens, num, parents).first(num)
    start = np.array([10, 20, 30, 40])[:num_rows]
    entries = Entries(np.arange(num_rows), start, 1 + num, num_rows, drafts, 1 + num, branches_of(start, drafts))
    asked = np.arange(width + 1) < 1 + num[:, None]
    logits = torch.full((int(asked.sum()), sampling_rig.config.model.vocab_size), -1.0)
    logits[torch.arange(len(logits)), torch.from_numpy(targets[asked])] = 1.0

    runs = verify(entries, logits, np.zeros(num_rows, np.int64), sampling_rig.runner.sampler)

    nodes = torch.from_numpy(np.concatenate((np.zeros((num_rows, 1), np.int64), tokens), 1))
    hung = torch.from_numpy(np.concatenate((np.full((num_rows, 1), -1), parents + 1), 1)).int()
    accepted, want, path = verify_tree_ref(nodes, hung, torch.from_numpy(targets), torch.from_numpy(1 + num), width)
    assert (runs.count == accepted.numpy() + 1).all() and not runs.failure.any()
    for row in range(num_rows):
        count = int(runs.count[row])
        assert runs.tokens[row, :count].tolist() == want[row, :count].tolist()
        assert runs.path[row, :count].tolist() == path[row, :count].tolist()


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_change_no_token_and_leave_the_cache_of_chains(spec: ModelSpec, kind: str, size: int) -> None:
    plain, want = generate(spec, KINDS[kind], NullProposer(), 0, size)
    oracle = Oracle({sequence.row: sequence.outputs for sequence in want})
    rig, got = generate(spec, KINDS[kind], oracle, 9, size)
    assert oracle.num_steps < NUM_OUTPUTS and oracle.num_forks > 20
    for sequence, reference in zip(got, want, strict=True):
        assert sequence.outputs[:NUM_OUTPUTS] == reference.outputs[:NUM_OUTPUTS]
        num = min(sequence.num_computed, reference.num_computed)
        assert num >= len(reference.tokens) - 2
        assert (cached(rig, sequence, num) - cached(plain, reference, num)).abs().max() < 1e-4


def test_log_probabilities_behind_a_tree_are_those_without(spec: ModelSpec) -> None:
    def run(proposer: NullProposer, most: int) -> list[tuple[int, float, list[int]]]:
        rig = Rig(spec, proposer=proposer, max_draft=most, num_blocks=256)
        sequence, found = rig.admit(prompts()[4], LOGPROBS), list[tuple[int, float, list[int]]]()
        while len(found) < 20:
            chunk = [] if sequence.outputs else [(sequence, len(sequence.tokens))]
            rig.run([sequence] if sequence.outputs else [], chunk)
            for place in range(int(rig.output.num_accepted[0])):
                top = rig.output.top_ids[place, :3].tolist()
                found.append((int(rig.output.tokens[0, place]), float(rig.output.logprob[place]), top))
        return found

    want = run(NullProposer(), 0)
    oracle = Oracle({0: [token for token, *_ in want]})
    for (token, logprob, top), reference in zip(run(oracle, 9), want, strict=False):
        assert (token, top) == (reference[0], reference[2])
        assert logprob == pytest.approx(reference[1], abs=1e-4)
    assert oracle.num_steps < 15


def test_bad_words_are_those_of_each_path(spec: ModelSpec) -> None:
    def run(proposer: NullProposer, most: int, words: list[tuple[tuple[int, ...], ...]]) -> list[Sequence]:
        rig = Rig(spec, proposer=proposer, max_draft=most, num_blocks=256)
        pairs = zip(prompts(), words, strict=True)
        sequences = [rig.admit(prompt, replace(GREEDY, bad_words=of_row)) for prompt, of_row in pairs]
        rig.generate(sequences, NUM_OUTPUTS, chunk=16)
        return sequences

    free = [sequence.outputs for sequence in run(NullProposer(), 0, [()] * len(prompts()))]
    words = [(tuple(outputs[3:5]), tuple(outputs[8:11]), tuple(outputs[1:4])) for outputs in free]
    want = run(NullProposer(), 0, words)
    assert all(
        sequence.outputs[:NUM_OUTPUTS] != outputs[:NUM_OUTPUTS] for sequence, outputs in zip(want, free, strict=True)
    )
    for answers in ([sequence.outputs for sequence in want], free):  # also what is forbidden
        got = run(Oracle(dict(enumerate(answers))), 9, words)
        assert [s.outputs[:NUM_OUTPUTS] for s in got] == [s.outputs[:NUM_OUTPUTS] for s in want]
