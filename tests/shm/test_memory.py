"""What memory is left, under made-up cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

from slipring.shm.memory import available_bytes

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
