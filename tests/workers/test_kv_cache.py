"""How the KV pool is sized."""

from __future__ import annotations

import msgspec
import pytest

from slipring.shm.spec import ModelSpec
from slipring.workers.kv_cache import MemoryShortageError, size_pool
from tests.workers.runner_rig import worker_config

GIB = 2**30


def test_the_pool_holds_what_the_budget_holds() -> None:
    spec = ModelSpec(
        architecture="llama", name="", path="", format="", files=(), tensors=(), dtype="float32", vocab_size=1,
        hidden_size=1, intermediate_size=1, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=8,
        max_position_embeddings=1, rms_norm_eps=0.0, rope_theta=1.0,
    )  # fmt: skip
    each = 2 * 2 * 8 * 8 * 4
    config = worker_config(spec, num_blocks=None, kv_cache_bytes=10 * each - 1)
    assert size_pool(config, GIB) == 9
    assert size_pool(msgspec.structs.replace(config, num_blocks=4), GIB) == 4
    with pytest.raises(MemoryShortageError, match="--kv-cache-memory-bytes"):
        size_pool(config, 8 * each)
    with pytest.raises(MemoryShortageError, match="--kv-cache-memory-bytes"):
        size_pool(msgspec.structs.replace(config, kv_cache_bytes=each - 1), GIB)
