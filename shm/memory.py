"""How much memory this process may still take: the machine's, and every cgroup limit above us (v1 and v2)."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


def available_bytes(root: Path = Path("/")) -> int:
    """Free memory, reclaimable page cache included, under the tightest limit. `root` is for tests."""
    return max(0, min(_machine(root), _cgroup(root)))


def _machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup(root: Path) -> int:
    """The least headroom over our own cgroup and all its ancestors."""
    headroom = _UNLIMITED
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, inactive = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage, inactive = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = base / path.lstrip("/")
        # In a container the path may name the host's tree, of which only the namespace's root is mounted.
        while group != base.parent:
            headroom = min(headroom, _headroom(group, limit, usage, inactive))
            group = group.parent
    return headroom


def _headroom(group: Path, limit_name: str, usage_name: str, inactive_name: str) -> int:
    limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= _UNLIMITED:
        return _UNLIMITED
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == inactive_name:
            return int(limit) - int(usage) + int(value)
    return int(limit) - int(usage)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
