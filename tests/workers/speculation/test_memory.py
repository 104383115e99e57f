"""What drafts take is left room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipring.shm.spec import SpeculationSpec
from slipring.workers.kv_cache import DraftMemory, KvCache, MemoryShortageError, size_pool
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import load_head, save_head, shapes
from slipring.workers.speculation.memory import draft_memory
from tests.workers.runner_rig import worker_config
from tests.workers.tiny_models import save_tiny


def test_of_a_draft_model_what_it_takes_when_it_is_loaded(tmp_path: Path) -> None:
    spec, (draft, model) = save_tiny("qwen3", tmp_path / "large")[0], save_tiny("llama", tmp_path / "small")
    speculation = SpeculationSpec(method="draft_model", draft=draft)
    found = draft_memory(worker_config(spec, max_draft=3, speculation=speculation))
    assert found.for_each_block == KvCache(draft, 4, 8, torch.float32).block_bytes
    assert found.weights == sum(weight.nbytes for weight in model.parameters())
    assert draft_memory(worker_config(spec, max_draft=0, speculation=speculation)) == DraftMemory()


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_of_a_head_no_less_than_it_takes(tmp_path: Path, method: str) -> None:
    spec = save_tiny("llama", tmp_path / "tiny")[0]
    weights = {name: torch.ones(shape) for name, shape in shapes(spec).items()}
    save_head(tmp_path / "head", EagleHead(spec, weights, torch.arange(9)), {})
    speculation = SpeculationSpec(method=method, model=str(tmp_path / "head"))
    found = draft_memory(worker_config(spec, max_draft=3, speculation=speculation))
    loaded = load_head(tmp_path / "head", spec, 128).weights
    assert sum(tensor.nbytes for tensor in loaded.values()) <= found.weights
    layer = 2 * 8 * spec.num_kv_heads * spec.head_dim * 4
    assert found.for_each_block == (layer if method == "eagle" else 0)


def test_the_pool_leaves_it_room(tmp_path: Path) -> None:
    spec = save_tiny("llama", tmp_path)[0]
    own, drafts = 2 * 2 * 8 * spec.num_kv_heads * spec.head_dim * 4, DraftMemory(for_each_block=100, weights=1000)
    config = worker_config(spec, num_blocks=None, kv_cache_bytes=10 * own)
    num_blocks = 10 * own // (own + 100)
    assert size_pool(config, 2**30, drafts) == num_blocks == 9
    assert size_pool(config, num_blocks * (own + 100) + 1000, drafts) == num_blocks
    with pytest.raises(MemoryShortageError, match="what makes drafts"):
        size_pool(config, num_blocks * (own + 100) + 999, drafts)
