"""What drafts take is left room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipring.shm.spec import SpeculationSpec
from slipring.workers.kv_cache import DraftMemory, KvCache, MemoryShortageError, size_pool
from slipring.workers.link import StartRefused
from slipring.workers.loader import Weights
from slipring.workers.models.registry import build_model
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import load_head, save_head, shapes
from slipring.workers.speculation.medusa import MedusaProposer
from slipring.workers.speculation.medusa_head import Block, MedusaHeads, load_medusa, save_medusa
from slipring.workers.speculation.memory import draft_memory
from tests.workers.runner_rig import Rig, worker_config
from tests.workers.tiny_models import save_tiny


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_of_a_draft_model_what_it_takes_when_it_is_loaded(tmp_path: Path, family: str) -> None:
    spec, draft = save_tiny("qwen3", tmp_path / "large")[0], save_tiny(family, tmp_path / "small")[0]
    speculation = SpeculationSpec(method="draft_model", draft=draft)
    found = draft_memory(worker_config(spec, max_draft=3, speculation=speculation))
    assert found.for_each_block == KvCache(draft, 4, 8, torch.float32).block_bytes
    model = build_model(draft, Weights(draft, torch.float32), 128)
    held = {id(tensor): num_bytes(tensor) for tensor in tensors_of(model)}
    tables = num_bytes(model.cos_sin)
    assert found.fixed == sum(held.values()) - tables
    assert draft_memory(worker_config(spec, max_draft=0, speculation=speculation)) == DraftMemory()


@pytest.mark.parametrize(("method", "taps"), [("eagle", ()), ("eagle", (1, 2)), ("medusa", ())])
def test_of_a_head_what_it_takes_when_it_is_loaded(tmp_path: Path, method: str, taps: tuple[int, ...]) -> None:
    spec, head = save_tiny("llama", tmp_path / "tiny")[0], tmp_path / "head"
    if method == "eagle":
        weights = {name: torch.ones(shape) for name, shape in shapes(spec, taps).items()}
        save_head(head, EagleHead(spec, weights, torch.arange(9), taps), {})
    else:
        block = Block(torch.ones(spec.hidden_size, spec.hidden_size), torch.ones(spec.hidden_size))
        save_medusa(head, MedusaHeads([[block], [block]], [], torch.arange(9)), {})
    speculation = SpeculationSpec(method=method, model=str(head))
    found = draft_memory(worker_config(spec, max_draft=3, speculation=speculation))
    rig = Rig(spec, max_draft=3)
    runner = rig.runner
    if method == "eagle":
        target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
        proposer = EagleProposer(target, load_head(head, spec, 128))
        held = list(tensors_of((proposer._head.weights, proposer._packed, proposer._backlog)))
        assert found.for_each_block == proposer._kv.block_bytes
    else:
        proposer = MedusaProposer(rig.model, runner.rows, runner.sampler, load_medusa(head, spec))
        held = list(tensors_of(proposer._medusa))
        assert found.for_each_block == 0
    needed = sum({id(tensor): num_bytes(tensor) for tensor in held}.values())
    # Small numbers, such as scales, count as wide ones.
    spare = 60_000
    assert needed <= found.fixed <= needed + spare


def test_a_head_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    spec = save_tiny("llama", tmp_path / "tiny")[0]
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(20))
    speculation = SpeculationSpec(method="eagle", model=str(tmp_path))
    with pytest.raises(StartRefused, match="head for --speculative-config cannot be loaded"):
        draft_memory(worker_config(spec, max_draft=3, speculation=speculation))


def tensors_of(held: object) -> Iterator[torch.Tensor]:
    """All tensors that an object leads to."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict):
        for each in held.values():
            yield from tensors_of(each)
    elif isinstance(held, (list, tuple)):
        for each in held:
            yield from tensors_of(each)
    elif type(held).__module__.startswith("slipring.workers."):
        slots = (field.name for field in dataclasses.fields(held)) if dataclasses.is_dataclass(held) else vars(held)
        for name in slots:
            yield from tensors_of(getattr(held, name))


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def test_the_pool_leaves_it_room(tmp_path: Path) -> None:
    spec = save_tiny("llama", tmp_path)[0]
    own, drafts = 2 * 2 * 8 * spec.num_kv_heads * spec.head_dim * 4, DraftMemory(for_each_block=100, fixed=1000)
    config = worker_config(spec, num_blocks=None, kv_cache_bytes=10 * own)
    num_blocks = 10 * own // (own + 100)
    assert size_pool(config, 2**30, drafts) == num_blocks == 9
    assert size_pool(config, num_blocks * (own + 100) + 1000, drafts) == num_blocks
    with pytest.raises(MemoryShortageError, match="what makes drafts"):
        size_pool(config, num_blocks * (own + 100) + 999, drafts)
