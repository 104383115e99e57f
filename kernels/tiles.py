"""The static tile table: (kernel, architecture) -> constexpr tiles, warps and stages. There is no autotuning.

A wrapper asks `tiles(name)` for the device it launches on; the compile gate walks all of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

TILES: dict[str, dict[str, dict[str, Any]]] = {}
"""name -> architecture (or `any`) -> {constexpr: value, "num_warps": n, "num_stages": n}."""


def register(name: str, **by_architecture: dict[str, Any]) -> None:
    """Each kernel file enters its own rows, beside the kernel. Raises ValueError for a second entry of a name."""
    if name in TILES:
        raise ValueError(f"tiles for {name!r} are registered twice")
    TILES[name] = by_architecture


def lookup(name: str, architecture: str) -> dict[str, Any]:
    """The row for an architecture, or the kernel's `any` row. Raises KeyError when it has neither."""
    rows = TILES[name]
    return rows[architecture] if architecture in rows else rows["any"]


def tiles(name: str) -> dict[str, Any]:
    """The row for the device at hand (the interpreter counts as sm_90)."""
    return lookup(name, current_architecture())


@functools.cache
def current_architecture() -> str:
    """Of this process's device. Every launch asks, and torch takes microseconds to say."""
    if not torch.cuda.is_available():
        return "sm_90"
    if torch.version.hip:
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    major, _ = torch.cuda.get_device_capability()
    return f"sm_{major}0"
