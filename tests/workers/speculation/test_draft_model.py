"""A draft model inside the real Runner: it changes no token, and its paged state is that of a dense computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.kv_cache import KvCache
from slipring.workers.speculation import draft_model
from slipring.workers.speculation.draft_model import DraftModelProposer
from tests.workers.runner_rig import GREEDY, Rig, Sequence, random_prompts
from tests.workers.tiny_models import save_tiny

SEEDED = SamplingParams(max_tokens=1, temperature=0.4, seed=11)
"""Noise is added to the best 32 tokens alone, so a flat distribution would be guessed less well."""
MOST, NUM_OUTPUTS = 3, 24


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """Another shape, another draw of weights."""
    return save_tiny("llama-one-kv-head", tmp_path_factory.mktemp("other"))[0]


def with_draft_model(spec: ModelSpec, draft: ModelSpec, **changes: object) -> tuple[Rig, DraftModelProposer]:
    rig, lender = Rig(spec, **{"max_draft": MOST, "num_blocks": 256} | changes), Rig(draft)  # pyright: ignore
    size, dtype = rig.config.block_size, torch.float32
    kv = KvCache(draft, rig.kv.num_blocks, size, dtype)
    group_heads = draft.num_heads // draft.num_kv_heads
    builder = BatchBuilder(rig.table, rig.runner.rows, size, kv.block_bytes // 4, group_heads, dtype)
    proposer = DraftModelProposer(
        lender.model, kv, builder, rig.table, rig.runner.rows, rig.runner.sampler, spec.vocab_size
    )
    rig.runner.proposer = proposer
    return rig, proposer


def prompts() -> list[list[int]]:
    return random_prompts(1, 5, 8, 23, 41)


def generate(rig: Rig, params: SamplingParams, chunk: int = 16) -> list[Sequence]:
    return rig.answer(prompts(), params, NUM_OUTPUTS, chunk)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_model_changes_no_token(spec: ModelSpec, other: ModelSpec, params: SamplingParams) -> None:
    want = generate(Rig(spec, num_blocks=256), params)
    got = generate(with_draft_model(spec, other)[0], params)
    for sequence, reference in zip(got, want, strict=True):
        assert sequence.outputs[:NUM_OUTPUTS] == reference.outputs[:NUM_OUTPUTS]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("slice_", [256, 10])
def test_the_target_as_its_own_draft_is_nearly_always_right(
    spec: ModelSpec, params: SamplingParams, slice_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "SLICE", slice_)
    rig, _ = with_draft_model(spec, spec)
    drafts, right, original = 0, 0, rig.runner.run

    def run(step: object, output: object) -> None:
        nonlocal drafts, right
        original(step, output)  # pyright: ignore[reportArgumentType]
        num = int(rig.output.header[rig.output.NUM_ROWS])
        drafts += int(rig.output.num_draft[:num].sum())
        right += int(np.maximum(rig.output.num_accepted[:num] - 1, 0).sum())

    rig.runner.run = run  # type: ignore[method-assign]
    generate(rig, params)
    assert drafts > 60 and right >= 0.97 * drafts


def test_rows_that_were_not_drafted_for_a_while_are_caught_up(spec: ModelSpec) -> None:
    rig, proposer = with_draft_model(spec, spec)
    sequence = rig.admit(prompts()[3])
    inner, catch_up, asked = proposer.propose, proposer.catch_up, [3, 0, 0, 0, 0, 1, 3, 0, 3, 3]
    for most in [0, *asked]:
        proposer.catch_up = catch_up if most else lambda rows: None  # type: ignore[method-assign]
        proposer.propose = lambda rows, room, most=most: inner(rows, np.minimum(room, most))  # type: ignore[method-assign]
        before = len(sequence.outputs)
        rig.run([sequence] if before else [], [] if before else [(sequence, 23)])
        assert len(sequence.outputs) - before == most + 1


def test_shared_blocks_bring_their_draft_state_along(spec: ModelSpec) -> None:
    rig, proposer = with_draft_model(spec, spec)
    prompt = prompts()[4]
    first = rig.admit(prompt)
    rig.generate([first], 8)
    seen: list[int] = []
    inner = proposer._compute
    proposer._compute = lambda rows, end: seen.append(int((end - proposer._computed[rows]).sum())) or inner(rows, end)  # type: ignore[method-assign]
    for known, expected in ((True, len(prompt) - 40), (False, len(prompt) - 8)):
        if not known:
            proposer._entered[first.blocks[1]] = False
        again = rig.admit(prompt)
        again.num_computed, again.blocks[:5] = 40, first.blocks[:5]  # as the prefix cache gives them out
        rig.table.block_table[again.row, :5] = first.blocks[:5]
        rig.run([], [(again, 1)])
        seen.clear()
        rig.generate([again], 6)
        assert again.outputs[:6] == first.outputs[:6]
        assert seen[0] <= expected + 1 and len(again.outputs) >= 5


def test_a_block_of_another_row_is_not_taken_for_seen(spec: ModelSpec) -> None:
    rig, proposer = with_draft_model(spec, spec)
    first = rig.admit(prompts()[4])
    rig.generate([first], 4)
    assert proposer._entered[first.blocks[:5]].all()
    second = rig.admit(prompts()[3])
    second.blocks[:2] = first.blocks[:2]  # freed, and handed out again
    rig.table.block_table[second.row, :2] = first.blocks[:2]
    rig.run([], [(second, 23)])
    assert not proposer._entered[first.blocks[:2]].any()
    rig.generate([second], 12)
    want = Rig(spec)
    reference = want.admit(prompts()[3])
    want.generate([reference], 12)
    assert second.outputs[:12] == reference.outputs[:12]


def test_what_is_refused(spec: ModelSpec, other: ModelSpec, tmp_path: Path) -> None:
    from slipring.runtime.draft_model import resolve_draft_model
    from slipring.runtime.speculation import SpeculationError
    from tests.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.save(str(Path(spec.path) / "tokenizer.json"))
    tokenizer.save(str(Path(other.path) / "tokenizer.json"))
    assert resolve_draft_model(other.path, spec.path).num_kv_heads == 1
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(Path(other.path) / "tokenizer.json"))
    with pytest.raises(SpeculationError, match=r"other.*another vocabulary.*tiny.*'more' is 257 and None"):
        resolve_draft_model(other.path, spec.path)
    with pytest.raises(SpeculationError, match="nowhere"):
        resolve_draft_model(str(tmp_path / "nowhere"), spec.path)
