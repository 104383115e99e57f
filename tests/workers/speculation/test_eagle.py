"""An EAGLE head inside the real Runner: it changes no token, and its paged state is that of a dense computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from slipring.kernels import int8_linear
from slipring.kernels.rope import rope
from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation import backlog, eagle
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import load_head, save_head, shapes
from slipring.workers.speculation.ngram import NgramProposer
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.step_costs import StepCosts
from slipring.workers.speculation.tree_search import Fed, TreeShape
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

SEEDED = SamplingParams(max_tokens=1, temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture(scope="module", params=[(), (1, 2)], ids=["eagle", "eagle3"])
def head(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random head, over most of the vocabulary."""
    path, generator, taps = tmp_path_factory.mktemp("head"), torch.Generator().manual_seed(1), request.param
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes(spec, taps).items()}
    save_head(path, EagleHead(spec, weights, torch.arange(3, spec.vocab_size - 2), taps), {})
    return path


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared here with dense computations is the state, not the rounding of int8."""
    monkeypatch.setattr(int8_linear, "_FEW_ROWS", 0)


DYNAMIC = TreeShape(3, num_children=3)
FIXED = TreeShape.of(3, 7, ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 0), (1, 0, 1)))


def with_head(
    spec: ModelSpec, head: Path, shape: TreeShape = TreeShape(None), max_draft: int = 3, block_size: int = 8
) -> tuple[Rig, EagleProposer]:
    rig = Rig(spec, max_draft=max_draft, num_blocks=256, block_size=block_size)
    runner = rig.runner
    target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
    runner.proposer = proposer = EagleProposer(target, load_head(head, spec, 128), shape)
    return rig, proposer


def prompts() -> list[list[int]]:
    return random_prompts(1, 5, 8, 23, 41)


def generate(rig: Rig, params: SamplingParams, chunk: int = 16) -> list[Sequence]:
    return rig.answer(prompts(), params, 20, chunk)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_head_changes_no_token(spec: ModelSpec, head: Path, params: SamplingParams) -> None:
    want = generate(Rig(spec, num_blocks=256), params)
    for shape, most in ((TreeShape(None), 3), (DYNAMIC, 8), (FIXED, 7)):
        got = generate(with_head(spec, head, shape, most)[0], params)
        for sequence, reference in zip(got, want, strict=True):
            assert sequence.outputs[:20] == reference.outputs[:20]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", [TreeShape(None), DYNAMIC], ids=["chains", "trees"])
def test_copies_beside_a_head_change_no_token(
    spec: ModelSpec, head: Path, shape: TreeShape, params: SamplingParams
) -> None:
    """In one step some rows take the head's drafts, trees perhaps, and others copies."""
    want = generate(Rig(spec, num_blocks=256), params)
    rig, proposer = with_head(spec, head, shape, 8)
    by_both = 0

    class Watched(AdaptiveProposer):
        def propose(self, rows: IntArray, most: IntArray) -> Drafts:
            nonlocal by_both
            drafts = super().propose(rows, most)
            by_both += int(self._free._depth[rows].any() and self._dear._depth[rows].any())
            return drafts

    flat, copies = StepCosts((1, 64), [1.0, 1.01]), NgramProposer(16, 1, 4)
    rig.runner.proposer = Watched(proposer, flat, 16, shape.depth, copies, lambda: 0.0)
    got = generate(rig, params)
    assert by_both
    for sequence, reference in zip(got, want, strict=True):
        assert sequence.outputs[:20] == reference.outputs[:20]


def chain_worth(proposer: EagleProposer, row: int, tokens: list[int]) -> tuple[float, list[int]]:
    """The head's chance for these drafts, read one after the other, and their ranks among its guesses."""
    rows, position = np.array([row]), proposer._target.rows.position[[row]]
    hidden, total, ranks = proposer._feature[[row]], 0.0, list[int]()
    for place, token in enumerate(tokens):
        found, logp, _ = proposer._guess(hidden, rows, position + place + 1, 32)
        ranks.append(found[0].tolist().index(token))
        total += float(logp[0, ranks[-1]])
        hidden = proposer._read(rows, Fed(np.array([1]), np.array([[token]]), position + place, None), hidden)
    return float(np.exp(total)), ranks


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("shape", "most"), [(DYNAMIC, 8), (DYNAMIC, 3), (FIXED, 7)], ids=["8", "3", "fixed"])
def test_what_a_head_reads_in_a_tree_is_what_it_reads_in_chains(
    spec: ModelSpec, head: Path, params: SamplingParams, shape: TreeShape, most: int
) -> None:
    rig, proposer = with_head(spec, head, shape, 8, block_size=4)
    sequences = generate(rig, params)
    all_ranks = check_tree(proposer, sequences, most)
    assert shape is not FIXED or all(ranks == set(FIXED.paths) for ranks in all_ranks)


def check_tree(proposer: EagleProposer, sequences: list[Sequence], most: int) -> list[set[tuple[int, ...]]]:
    """Each draft is worth what the head says in a chain; returns each row's ranks of its drafts' paths."""
    rows, found = np.array([sequence.row for sequence in sequences]), list[set[tuple[int, ...]]]()
    proposer.catch_up(rows)
    drafts = proposer.propose(rows, np.full(len(rows), most))
    assert drafts.worth is not None and (drafts.num == most).all()
    for i, row in enumerate(rows.tolist()):
        paths, all_ranks = [list[int]()], set[tuple[int, ...]]()
        for token, parent in zip(drafts.tokens[i].tolist(), drafts.follows[i].tolist(), strict=True):
            paths.append([*paths[parent + 1], token])
        for draft, path in enumerate(paths[1:]):
            worth, ranks = chain_worth(proposer, row, path)
            assert drafts.worth[i, draft] == pytest.approx(worth, rel=1e-3)
            assert len(path) == 1 or drafts.worth[i, draft] <= drafts.worth[i, drafts.follows[i, draft]]
            all_ranks.add(tuple(ranks))
        found.append(all_ranks)
    return found


@torch.inference_mode()
def dense_guess(rig: Rig, head: Path, tokens: list[int], absent: range = range(0)) -> Tensor:
    """The head's guess after `tokens`, without the positions `absent`; nothing paged and nothing incremental."""
    spec, model = rig.config.model, rig.model
    other = Rig(spec, num_blocks=256)
    sequence = other.admit(tokens[:-1])
    other.model.taps = (loaded := load_head(head, spec, 128)).taps
    computed: list[Tensor] = []
    inner = other.model.hidden
    other.model.hidden = lambda batch, kv: computed.append(inner(batch, kv)) or computed[-1]  # type: ignore[method-assign]
    other.run([], [(sequence, len(tokens) - 1)])
    normed = model.normed(computed[0], torch.arange(len(tokens) - 1))
    cos, sin = model.cos_sin[: len(tokens) - 1].unsqueeze(2).unbind(1)

    def attend(heads: Tensor, value: Tensor) -> Tensor:
        turned = rope(heads, cos, sin)
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        groups = spec.num_heads // spec.num_kv_heads
        q, k, v = (
            x.transpose(0, 1)[None]
            for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        )
        seen = torch.ones(len(heads), len(heads), dtype=torch.bool).tril_()
        seen[len(heads) - 1, list(absent)] = False  # a layer's earlier guesses do not matter to its last one
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return out[0].transpose(0, 1).flatten(1)

    embedded = F.embedding(torch.tensor(tokens[1:]), model.embedding)
    return loaded.forward(embedded, loaded.first(normed, other.model.tapped), attend)[-1]


@pytest.mark.parametrize("chunk", [4, 16])
def test_paged_state_is_that_of_a_dense_computation(spec: ModelSpec, head: Path, chunk: int) -> None:
    rig, proposer = with_head(spec, head)
    for sequence in generate(rig, SEEDED, chunk):
        proposer.catch_up(np.array([sequence.row]))
        expected = dense_guess(rig, head, sequence.tokens)
        assert (proposer._feature[sequence.row] - expected).abs().max() < 1e-3


def test_a_head_does_without_what_it_never_entered(spec: ModelSpec, head: Path) -> None:
    rig, proposer = with_head(spec, head, DYNAMIC, 8)
    (prompt,) = [prompt for prompt in prompts() if len(prompt) == 41]
    first = rig.admit(prompt)
    rig.generate([first], 6)

    def after_a_hit() -> Sequence:
        """Another row on the first one's blocks, as the prefix cache gives them out."""
        again = rig.admit(prompt)
        again.num_computed, again.blocks[:4] = 32, first.blocks[:4]
        rig.table.block_table[again.row, :4] = first.blocks[:4]
        return again

    for absent in (range(0), range(1, 3), range(4)):
        proposer.overwritten(np.array(first.blocks)[absent])
        again, whole = after_a_hit(), rig.admit(prompts()[3])
        rig.generate([again, whole], 6)
        assert again.outputs[:6] == first.outputs[:6]
        check_tree(proposer, [again, whole], 8)
        for sequence, missing in ((again, absent), (whole, range(0))):
            expected = dense_guess(rig, head, sequence.tokens, range(missing.start * 8, missing.stop * 8))
            assert (proposer._feature[sequence.row] - expected).abs().max() < 1e-3
        assert proposer._entered[again.blocks[4]], "what is entered behind a hole counts"


class Sleeper(NullProposer):
    """A head that is not asked while it sleeps."""

    def __init__(self, head: EagleProposer) -> None:
        self.admit, self.saw, self._head = head.admit, head.saw, head
        self.sleeps = True

    def catch_up(self, rows: IntArray) -> None:
        if not self.sleeps:
            self._head.catch_up(rows)

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        return Drafts.none(len(rows)) if self.sleeps else self._head.propose(rows, most)


def test_a_head_that_slept_makes_up_for_what_it_kept(
    spec: ModelSpec, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """41 positions were entered while it was in use, the last 16 wait; what lies between is lost, block by block."""
    monkeypatch.setattr(backlog, "_SIZE", 16)
    rig, proposer = with_head(spec, head)
    rig.runner.proposer = sleeper = Sleeper(proposer)
    (prompt,) = (prompt for prompt in prompts() if len(prompt) == 41)

    def check(sequence: Sequence, absent: range) -> None:
        proposer.catch_up(np.array([sequence.row]))
        assert proposer._next[sequence.row] == len(sequence.tokens) - 1
        expected = dense_guess(rig, head, sequence.tokens, absent)
        assert (proposer._feature[sequence.row] - expected).abs().max() < 1e-3

    kept, lost = (rig.admit(prompt, SEEDED) for _ in range(2))
    rig.generate([kept], 13)
    check(kept, range(0))
    rig.generate([lost], 36)  # positions 41 to 75 are known; 60 to 75 wait, of which 64 is the first of a block
    check(lost, range(40, 64))
    rig.generate([lost], 60)
    assert not proposer._entered[lost.blocks[5]] and proposer._entered[lost.blocks[8]]
    unread = rig.admit(prompt, SEEDED)
    rig.generate([unread], 1)
    assert not proposer._entered[unread.blocks].any(), "nobody asked for drafts for long"
    check(unread, range(32))
    sleeper.sleeps = False
    rig.generate([unread], 10)
    read = rig.admit(prompt, SEEDED)
    rig.generate([read], 1)
    assert proposer._entered[read.blocks[:5]].all()
    check(read, range(0))


def test_prompts_of_a_batch_that_is_larger_than_those_before_wait(
    spec: ModelSpec, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts seldom pay there. What finds room is not lost: the head guesses as ever where it is asked."""
    monkeypatch.setattr(backlog, "_SIZE", 16)
    monkeypatch.setattr(eagle, "_FEW_ROWS", 2)
    rig, proposer = with_head(spec, head)
    first = [rig.admit(prompt) for prompt in random_prompts(24, 24)]
    rig.run([], [(row, 24) for row in first])
    assert all(proposer._entered[row.blocks[:3]].all() for row in first)
    many = [rig.admit(prompt) for prompt in random_prompts(*[24] * 4)]
    rig.run(first, [(row, 24) for row in many])
    assert not any(proposer._entered[row.blocks].any() for row in many)
    for sequence in many:
        proposer.catch_up(np.array([sequence.row]))
        expected = dense_guess(rig, head, sequence.tokens, range(8))
        assert (proposer._feature[sequence.row] - expected).abs().max() < 1e-3
    proposer._rows = 2.0
    again = [rig.admit(prompt) for prompt in random_prompts(*[16] * 4)]
    rig.run([], [(row, 16) for row in again])
    assert all(proposer._entered[row.blocks[:2]].all() for row in again)


class Replay(Sleeper):
    """Drafts what a row is known to draw, as copies of what it has written before would."""

    def __init__(self, head: EagleProposer, tokens: list[int]) -> None:
        super().__init__(head)
        self._tokens = tokens

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        if not self.sleeps or not len(rows):
            return super().propose(rows, most)
        position = self._head._target.rows.position[rows]
        tokens = np.stack([np.array(self._tokens)[at + 1 : at + 1 + int(most.max())] for at in position])
        return Drafts(tokens, most)


def test_rows_for_which_others_draft_are_read_all_along(
    spec: ModelSpec, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "_SIZE", 16)
    prompt = prompts()[4]
    plain = Rig(spec, num_blocks=256)
    known = plain.admit(prompt, SEEDED)
    plain.generate([known], 80)
    rig, proposer = with_head(spec, head)
    rig.runner.proposer = replay = Replay(proposer, known.tokens)
    row = rig.admit(prompt, SEEDED)
    rig.generate([row], 72)
    assert row.outputs[:72] == known.outputs[:72]
    replay.sleeps = False
    rig.generate([row], len(row.outputs) + 1)
    assert proposer._entered[row.blocks[: (len(row.tokens) - 1) // 8]].all(), "nothing was lost"
    read = rig.admit(prompt, SEEDED)
    rig.generate([read], 1)
    assert proposer._entered[read.blocks[:5]].all(), "the head is in use as before"


def test_what_is_not_a_number_spoils_one_row_alone(spec: ModelSpec, head: Path) -> None:
    """A row whose hidden states overflowed has no drafts; the next one on its blocks has."""
    rig, proposer = with_head(spec, head)
    broken = rig.admit(prompts()[4])
    inner = rig.model.hidden
    rig.model.hidden = lambda batch, kv: inner(batch, kv) * float("nan")  # type: ignore[method-assign]
    states = proposer._states
    proposer._states = lambda hidden, at: states(hidden, at) * float("nan")  # type: ignore[method-assign]
    rig.run([], [(broken, 41)])
    rig.model.hidden, proposer._states = inner, states  # type: ignore[method-assign]
    assert proposer._next[broken.row] == -1 and not proposer._entered[broken.blocks].any()
    rig._free[:0] = broken.blocks
    after = rig.admit(prompts()[3])
    assert set(after.blocks) <= set(broken.blocks)
    rig.generate([after], 3)
    check_tree(proposer, [after], 3)
    expected = dense_guess(rig, head, after.tokens)
    assert (proposer._feature[after.row] - expected).abs().max() < 1e-3


def test_a_block_that_is_written_again_is_forgotten(spec: ModelSpec, head: Path) -> None:
    rig, proposer = with_head(spec, head)
    first = rig.admit(prompts()[3])
    rig.generate([first], 1)
    assert proposer._entered[first.blocks[:2]].all()
    rig.runner.proposer, proposer._use = Sleeper(proposer), 0.0
    rig._free[:0] = first.blocks
    second = rig.admit(prompts()[3])
    rig.generate([second], 1)
    assert second.blocks[:2] == first.blocks[:2] and not proposer._entered[second.blocks].any()


def test_a_head_for_another_model_is_refused(spec: ModelSpec, head: Path, tmp_path: Path) -> None:
    other = save_tiny("qwen3", tmp_path)[0]
    assert shapes(other) != shapes(spec)
    with pytest.raises(ValueError, match="another model"):
        load_head(head, other, 128)
    with pytest.raises(ValueError, match="guesses token 200, this model has 200"):
        load_head(head, replace(spec, vocab_size=200), 128)
    if load_head(head, spec, 128).taps:
        with pytest.raises(ValueError, match=r"no rising layers \[1, 2\]: it has 1"):
            load_head(head, replace(spec, num_layers=1), 128)
