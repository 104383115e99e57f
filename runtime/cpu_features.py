"""What the CPU's instructions are good for, by the names that the kernel gives them."""

from __future__ import annotations

import re
from pathlib import Path

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Intel and AMD, Intel, Arm: instructions that multiply bfloat16."""


def cpu_features(root: Path = Path("/")) -> tuple[str, ...]:
    """Sorted; empty where there is no /proc/cpuinfo under `root`, or none that says."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    return tuple(sorted(found[1].split())) if found else ()


def lacks_bfloat16(features: tuple[str, ...]) -> bool:
    """bfloat16 has to be widened, number by number. Of a CPU that says nothing of itself nothing is claimed."""
    return bool(features) and not _BFLOAT16.intersection(features)
