"""What a compiled kernel's binary says of itself: registers, spills, stack, shared memory, matrix instructions, stores.

NVIDIA: `cuobjdump --dump-resource-usage` gives registers and stack but no spills, so local loads and stores are
counted in nvdisasm's listing; both tools are in Triton's wheel. Stores to global memory are counted in it too: where
an operation has no meaning for a compiler (a shift that is too wide, a branch that it thinks is never taken) it may
drop all that follows, and the rest compiles, fits every limit and does nothing.
AMD: the metadata at the end of the assembly. Shared memory (LDS) is the compiler's own word for both: over the limit
it compiles without an error, and fails at launch.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SASS_MATRIX = re.compile(r"\b(UTC[A-Z]*MMA|[HQI]G?MMA)\b")
_SASS_STORE = re.compile(r"\b(?:STG|ST|ATOMG?|REDG?|UTMASTG|UTMAREDG|UBLKRED)\b")
_AMD_MATRIX = re.compile(r"\bv_mfma_\w+")
_AMD_STORE = re.compile(r"\b(?:global|buffer|flat)_(?:store|atomic)_\w+")
_DOT = re.compile(r"tt\.dot .*: tensor<(?:\d+x)+(\w+)> \*.*-> tensor<(?:\d+x)?(\d+)x\d+x\w+>")
"""An operand's type and the rows of the result."""


@dataclass(frozen=True)
class Reading:
    registers: int
    """For each thread; on AMD vector registers, accumulation registers included."""
    spills: int
    """NVIDIA: local loads and stores in the code. AMD: spilled vector registers (scalar ones are cheap)."""
    stack: int
    """Bytes a thread."""
    shared: int
    """Bytes a program."""
    threads: int
    stores: int
    """Instructions that write to memory which outlives the program, atomic ones included."""
    matrix: tuple[str, ...]
    """Distinct matrix instructions."""
    dot_rows: int
    """Rows of the tallest tl.dot, 0 without one."""
    dot_types: tuple[str, ...]
    """Operand types of all tl.dot, as MLIR writes them."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def read(compiled: Any, tools: Path) -> Reading:
    """`compiled` is triton.compile's result; `tools` holds cuobjdump and nvdisasm."""
    target, metadata = compiled.metadata.target, compiled.metadata
    dots = _DOT.findall(compiled.asm["ttir"])
    if target.backend == "hip":
        registers, spills, stack, stores, matrix = _amd(compiled)
    else:
        registers, spills, stack, stores, matrix = _nvidia(compiled, tools)
    return Reading(
        registers=registers,
        spills=spills,
        stack=stack,
        shared=metadata.shared,
        threads=metadata.num_warps * target.warp_size,
        stores=stores,
        matrix=matrix,
        dot_rows=max((int(rows) for _, rows in dots), default=0),
        dot_types=tuple(sorted({operand for operand, _ in dots})),
    )


def _nvidia(compiled: Any, tools: Path) -> tuple[int, int, int, int, tuple[str, ...]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found, f"cuobjdump names no registers: {usage}"
        registers, stack = int(found[1]), int(found[2])
        code = _run(tools / "nvdisasm", "-c", "-ndf", file.name)
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return registers, spills, stack, len(_SASS_STORE.findall(code)), tuple(sorted(set(_SASS_MATRIX.findall(code))))


def _run(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _amd(compiled: Any) -> tuple[int, int, int, int, tuple[str, ...]]:
    code = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", code)
        assert found, f"the assembly's metadata has no {key}"
        return int(found[1])

    matrix = tuple(sorted(set(_AMD_MATRIX.findall(code))))
    # .vgpr_count is the unified total on gfx90a and later: accumulation registers are among them.
    registers, spills, stack = map(number, ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size"))
    return registers, spills, stack, len(_AMD_STORE.findall(code)), matrix
