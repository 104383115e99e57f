"""What a figure is, and what is kept of a run.

A figure is a module in `perf/` with `DESCRIPTION` and `measure(options) -> Measurement`. A run is written to
`perf/results/NAME.json` with the commit, the machine, versions, the seed and all samples, and the last line printed
is one JSON object with the summary. A figure asserts that its output is right before it reports how fast it was.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf" / "results"

_SIMD = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve")
"""What makes the same number of cores a different machine."""

# id -> module. The order is that of `python -m perf list`.
FIGURES = {
    "schedule": "perf.schedule",
    "update": "perf.update",
    "ring": "perf.ring",
    "publish": "perf.publish",
    "frontend": "perf.frontend",
    "connections": "perf.connections",
    "longprompt": "perf.longprompt",
    "structured": "perf.structured",
    "speculation": "perf.speculation",
    "startup": "perf.startup",
    "idle": "perf.idle",
    "faults": "perf.faults",
    "tiers": "perf.tiers",
    "compile-gate": "perf.compile_gate",
}


@dataclass(frozen=True)
class Options:
    compare: bool
    """Also run the baseline, in the same run."""
    seed: int
    quick: bool
    """Fewer samples: a smoke test, not a figure to publish."""
    only: str | None = None
    """Names, separated by commas, of what to measure; for figures that have parts."""


@dataclass
class Measurement:
    summary: dict[str, float | int]
    """The keys that the figure promises."""
    table: list[dict[str, Any]]
    """Rows for people; docs/figures.md shows these."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: str = ""


def percentile(samples: Any, share: float) -> float:
    return float(np.percentile(np.asarray(samples, np.float64), share))


def machine() -> dict[str, Any]:
    """The machine in words: enough to judge a figure by, nothing that names a host."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    flags = next((line.split(":")[1].split() for line in _lines("/proc/cpuinfo") if line.startswith("flags")), [])
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "simd": [name for name in _SIMD if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release().split("-")[0],
        "architecture": platform.machine(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("numpy", "uvloop", "aiohttp", "msgspec", "tokenizers", "torch"):
        found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The commit at hand; a plus says that files differ from it."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else "")


def write(name: str, options: Options, measurement: Measurement) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "figure": name,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "seed": options.seed,
        "quick": options.quick,
        "summary": measurement.summary,
        "table": measurement.table,
        "notes": measurement.notes,
        "samples": measurement.samples,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip()


def in_turns(kinds: Sequence[T], round_number: int) -> list[T]:
    """Everybody, and each round somebody else begins, so that what else the machine does hits all."""
    first = round_number % len(kinds)
    return [*kinds[first:], *kinds[:first]]
