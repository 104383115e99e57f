"""Medusa heads: they change no token, guess from the state that they were trained on, and published ones load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.medusa import MedusaProposer
from slipring.workers.speculation.medusa_head import Block, MedusaHeads, load_medusa, save_medusa
from slipring.workers.speculation.tree_search import CHAINS, TreeShape
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

SEEDED = SamplingParams(max_tokens=1, temperature=1.0, seed=11)
NUM_HEADS = 3


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture(scope="module")
def head(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, generator, size = tmp_path_factory.mktemp("head"), torch.Generator().manual_seed(1), spec.hidden_size
    blocks = [
        [Block(torch.randn(size, size, generator=generator) * 0.2, torch.randn(size, generator=generator))]
        for _ in range(NUM_HEADS)
    ]
    save_medusa(path, MedusaHeads(blocks, [], torch.arange(3, spec.vocab_size - 2)), {})
    return path


FIXED = TreeShape.of(3, 6, ((0,), (1,), (0, 2), (1, 0), (1, 1), (1, 1, 1)))


def with_heads(spec: ModelSpec, head: Path, shape: TreeShape = CHAINS) -> Rig:
    rig, medusa = Rig(spec, max_draft=8, num_blocks=256), load_medusa(head, spec)
    rig.runner.proposer = MedusaProposer(rig.model, rig.runner.rows, rig.runner.sampler, medusa, shape)
    return rig


def generate(rig: Rig, params: SamplingParams) -> list[Sequence]:
    return rig.answer(random_prompts(1, 5, 8, 23, 41), params, 20, chunk=16)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_heads_change_no_token(spec: ModelSpec, head: Path, params: SamplingParams) -> None:
    want = generate(Rig(spec, num_blocks=256), params)
    for shape in (CHAINS, FIXED, TreeShape.of(5, 8)):
        got = generate(with_heads(spec, head, shape), params)
        for sequence, reference in zip(got, want, strict=True):
            assert sequence.outputs[:20] == reference.outputs[:20]


def test_a_fixed_tree_holds_the_heads_guesses_by_rank(spec: ModelSpec, head: Path) -> None:
    rig = with_heads(spec, head, FIXED)
    rows = np.array([sequence.row for sequence in generate(rig, GREEDY)])
    drafts = rig.runner.proposer.propose(rows, np.full(len(rows), 6))
    chains = with_heads(spec, head, TreeShape(3, num_children=3))
    generate(chains, GREEDY)
    proposer = chains.runner.proposer
    assert isinstance(proposer, MedusaProposer) and (drafts.num == 6).all()
    for row, tokens, parents in zip(rows.tolist(), drafts.tokens.tolist(), drafts.follows.tolist(), strict=True):
        hidden, at, found = proposer._hidden[[row]], np.array([row]), set[tuple[int, ...]]()
        position = proposer._rows.position[at]
        guesses = [proposer._guess(hidden, at, position + place + 1, 3)[0][0].tolist() for place in range(3)]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            path = paths[parent + 1]
            paths.append((*path, guesses[len(path)].index(token)))
            found.add(paths[-1])
        assert found == set(FIXED.paths)


def test_a_fixed_tree_deeper_than_the_heads_is_refused(spec: ModelSpec, head: Path) -> None:
    with pytest.raises(ValueError, match="speculative_token_tree is 4 deep, but there are 3 heads"):
        with_heads(spec, head, TreeShape.of(4, 4, ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))))


def test_drafts_are_made_from_the_state_behind_the_last_but_one_token(spec: ModelSpec, head: Path) -> None:
    rig, medusa = with_heads(spec, head), load_medusa(head, spec)
    sequences = generate(rig, GREEDY)
    rows = np.array([sequence.row for sequence in sequences])
    drafts = rig.runner.proposer.propose(rows, np.array([5, 5, 2, 0, 1]))
    assert drafts.num.tolist() == [3, 3, 2, 0, 1]
    for sequence, draft, num in zip(sequences, drafts.tokens.tolist(), drafts.num.tolist(), strict=True):
        other = Rig(spec, num_blocks=256)
        seen: list[Tensor] = []
        inner = other.model.hidden
        other.model.hidden = lambda batch, kv, seen=seen, inner=inner: seen.append(inner(batch, kv)) or seen[-1]  # type: ignore[method-assign]
        again = other.admit(sequence.tokens[:-1])
        other.run([], [(again, len(sequence.tokens) - 1)])
        with torch.inference_mode():
            x = other.model.normed(seen[0], torch.tensor([len(sequence.tokens) - 2]))
            output = other.model.output_rows(medusa.token_ids)
            for place in range(num):
                (block,) = medusa.heads[place]
                scores = (x + F.silu(F.linear(x, block.weight, block.bias))) @ output.T
                assert draft[place] == medusa.token_ids[scores.argmax()]


def published(spec: ModelSpec, prefix: str, num_blocks: int = 2) -> dict[str, Tensor]:
    size, found = spec.hidden_size, {}
    for number in range(NUM_HEADS):
        for place in range(num_blocks):
            found[f"{prefix}{number}.{place}.linear.weight"] = torch.randn(size, size)
            found[f"{prefix}{number}.{place}.linear.bias"] = torch.randn(size)
        found[f"{prefix}{number}.{num_blocks}.weight"] = torch.randn(spec.vocab_size, size)
    return found


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads_load_as_they_are(spec: ModelSpec, tmp_path: Path, file: str, prefix: str) -> None:
    tensors = published(spec, prefix)
    if file.endswith(".pt"):
        torch.save(tensors, tmp_path / file)
    else:
        save_file(tensors, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 2}))
    medusa = load_medusa(tmp_path, spec)
    assert [len(blocks) for blocks in medusa.heads] == [2] * NUM_HEADS
    x = expected = torch.randn(4, spec.hidden_size)
    for place in range(2):
        name = f"{prefix}1.{place}.linear"
        expected = expected + F.silu(F.linear(expected, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
    assert torch.allclose(medusa.hidden(1, x), expected, atol=1e-4)
    assert torch.equal(medusa.outputs[1], tensors[f"{prefix}1.2.weight"])
    rig = with_heads(spec, tmp_path)
    assert rig.runner.proposer.propose(np.array([0]), np.array([2])).num.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"0.0.linear.bias": None}, "block 0.0 needs"),
        ({"0.0.linear.weight": torch.zeros(3, 3)}, r"0.0.linear.weight is \[3, 3\]"),
        ({"0.2.weight": None}, "2 of 3 heads have an output matrix"),
        ({"7.0.linear.weight": torch.zeros(3, 3)}, "numbered from 0"),
        ({"lm_head.weight": torch.zeros(3, 3)}, "lm_head.weight: not part"),
        ({"token_ids": torch.tensor([3, 9999])}, "guesses token 9999"),
    ],
)
def test_what_does_not_fit_is_named(
    spec: ModelSpec, tmp_path: Path, change: dict[str, Tensor | None], words: str
) -> None:
    tensors = {name: tensor for name, tensor in (published(spec, "") | change).items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        load_medusa(tmp_path, spec)
