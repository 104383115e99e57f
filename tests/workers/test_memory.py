"""What memory is left, under made-up cgroups of both versions, and how the KV pool is sized from it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slipring.shm.spec import ModelSpec
from slipring.workers.kv_cache import size_pool
from slipring.workers.memory import MemoryShortageError, available_bytes
from tests.workers.runner_rig import worker_config

GIB = 2**30


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n",
        "proc/self/cgroup": cgroup,
    } | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"})
    assert available_bytes(root) == 8 * GIB


def test_v2_counts_every_ancestor_and_gives_back_inactive_files(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": str(3 * GIB),
        "sys/fs/cgroup/a/memory.current": str(2 * GIB),
        "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": str(GIB),
    }
    assert available_bytes(machine(tmp_path, "0::/a/b\n", files)) == 3 * GIB // 2


def test_v1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    cgroup = "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n"
    assert available_bytes(machine(tmp_path, cgroup, files)) == GIB


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
