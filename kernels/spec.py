"""`KernelSpec`: what the compile gate needs to know to compile one kernel ahead of time, for an architecture.

Every kernel file has a module-level `SPECS` tuple, one entry for each variant that the engine will launch. The gate
(`perf/compile_gate.py`) walks them for every architecture of `ARCHITECTURES`; tiles come from `tiles.py`, the same
table that the launching wrapper reads, so that what is proven is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = ("sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class KernelSpec:
    name: str
    """Kernel and variant, e.g. `paged_decode.bf16_fp8kv`."""
    kernel: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Argument -> Triton type (`*bf16`, `i32`, `fp32`, ...) for all that are not constexpr."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """constexpr arguments other than tiles."""
    tiles: str | None = None
    """Key into `tiles.TILES`; its entry for the architecture adds constexpr tiles, num_warps and num_stages."""
    matrix: str | None = None
    """None, `fp16` (also bf16), `fp8` or `int8`: the class of matrix instruction that the binary must hold."""
    divisible_by_16: tuple[str, ...] = ()
    """Arguments (pointers and sizes) that the wrapper guarantees to be multiples of 16."""
    architectures: tuple[str, ...] = ARCHITECTURES
