"""The GPU worker without a GPU: its memory's arithmetic, its refusal, and that a CPU worker loads none of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipring.shm import wire
from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.shm.wire import SlotKind, WorkerError
from slipring.workers.cuda.decode import batch_buckets
from slipring.workers.cuda.memory import Budget
from slipring.workers.kv_cache import MemoryShortageError, block_bytes
from tests.workers.runner_rig import worker_config
from tests.workers.test_process import Engine
from tests.workers.tiny_models import save_tiny

GIB = 2**30


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def budget(total: int) -> Budget:
    """1 GiB of everything that is measured, and of edits; 1 GiB and 4 x 8 MiB of graphs; 2 % margin."""
    return Budget.measured(total, GIB, GIB, GIB, (GIB, 8 << 20), 4, GIB)


def config(spec: ModelSpec, **changes: object) -> WorkerConfig:
    return worker_config(spec, **({"num_blocks": None, "kv_cache_bytes": 0} | changes))


def test_the_pool_takes_what_is_left(spec: ModelSpec) -> None:
    each = block_bytes(spec, 8, torch.float32)
    left = 10 * GIB - 5 * GIB - 4 * (8 << 20) - int(0.02 * 10 * GIB)
    assert budget(10 * GIB).for_pool == left
    assert budget(10 * GIB).num_blocks(config(spec)) == left // each
    assert budget(10 * GIB).num_blocks(config(spec, num_blocks=7)) == 7
    assert budget(10 * GIB).num_blocks(config(spec, kv_cache_bytes=3 * each + 5)) == 3


def test_a_pool_larger_than_what_is_left_is_refused_with_the_shares(spec: ModelSpec) -> None:
    with pytest.raises(MemoryShortageError, match=r"9\.00 GiB but only 4\.77 GiB(?s:.*)weights +1\.00 GiB"):
        budget(10 * GIB).num_blocks(config(spec, kv_cache_bytes=9 * GIB))


def test_no_room_at_all_says_what_to_lower(spec: ModelSpec) -> None:
    with pytest.raises(MemoryShortageError, match="--max-num-batched-tokens"):
        budget(5 * GIB).num_blocks(config(spec))


@pytest.mark.parametrize(
    ("most", "buckets"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_batch_buckets(most: int, buckets: list[int]) -> None:
    assert batch_buckets(most) == buckets


def test_a_cpu_worker_loads_neither_triton_nor_the_gpu_path() -> None:
    code = (
        "import sys, slipring.workers.main, slipring.workers.startup, slipring.workers.runner\n"
        "assert not [name for name in sys.modules if name.startswith(('triton', 'slipring.workers.cuda'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent.parent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_worker_for_a_gpu_that_is_not_there_says_so(spec: ModelSpec) -> None:
    engine = Engine(spec, device="cuda:0")
    kind, slot, length = engine.next_record(60)
    assert kind == SlotKind.ERROR
    message = wire.decode(engine.outputs.payload(slot), length, WorkerError).message
    assert "cuda:0" in message and "no CUDA device" in message
    assert engine.process.wait(10) == 1
