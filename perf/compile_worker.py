"""Compiles kernels ahead of time, without a GPU: the compile gate's child process.

It prints the list of variants as one line of JSON, then answers each variant's number on stdin with a line of JSON.
A compiler that aborts takes this process with it; the gate starts another.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from perf.binary import read
from perf.planted import PLANTED
from slipring.kernels.spec import ARCHITECTURES, KernelSpec
from slipring.kernels.tiles import lookup

KERNELS = Path(__file__).parent.parent / "kernels"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
assert tuple(TARGETS) == ARCHITECTURES


@dataclass(frozen=True)
class Variant:
    spec: KernelSpec
    architecture: str
    planted: str
    """A word of the problem that the gate must find, or empty for the engine's own kernels."""

    def plain(self) -> dict[str, Any]:
        kernel = f"{self.spec.kernel.__module__}.{self.spec.kernel.__name__}"
        return {
            "name": self.spec.name,
            "kernel": kernel,
            "architecture": self.architecture,
            "matrix": self.spec.matrix,
            "planted": self.planted,
        }


def variants() -> list[Variant]:
    """Every spec of every kernel file for its architectures, then the planted ones."""
    own = [Variant(spec, name, "") for spec in _specs() for name in spec.architectures]
    return own + [Variant(spec, name, word) for spec, word in PLANTED for name in spec.architectures]


def _specs() -> Iterator[KernelSpec]:
    for path in sorted(KERNELS.glob("*.py")):
        if path.stem != "__init__":
            yield from getattr(importlib.import_module(f"slipring.kernels.{path.stem}"), "SPECS", ())


def source(spec: KernelSpec, architecture: str) -> tuple[ASTSource, dict[str, Any]]:
    """The typed source and the compiler's options. Raises KeyError for an argument that the spec does not name."""
    constants, options = dict(spec.constants), {}
    names = [parameter.name for parameter in spec.kernel.params]
    for key, value in (lookup(spec.tiles, architecture) if spec.tiles else {}).items():
        (constants if key in names else options)[key] = value
    if unknown := (constants.keys() | spec.signature.keys() | set(spec.divisible_by_16)) - set(names):
        raise KeyError(f"{spec.name} names arguments that the kernel lacks: {sorted(unknown)}")
    signature = {name: "constexpr" if name in constants else spec.signature[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible_by_16}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(fn=spec.kernel, signature=signature, constexprs=constexprs, attrs=attributes), options


def compile_variant(variant: Variant) -> dict[str, Any]:
    """`plain` with the reading or the error, and the seconds it took."""
    began = time.monotonic()
    answer = variant.plain()
    try:
        typed, options = source(variant.spec, variant.architecture)
        compiled = triton.compile(typed, target=TARGETS[variant.architecture], options=options)
        answer["reading"] = read(compiled, TOOLS).plain()
    except Exception as error:  # whatever the compiler raises is the finding
        lines = str(error).strip().splitlines() or [""]
        answer["error"] = f"{type(error).__name__}: {lines[-1][:300]}"
    return answer | {"seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    # Compilers print; the protocol keeps a descriptor of its own.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        todo = variants()
        print(json.dumps([variant.plain() for variant in todo] + [{"triton": triton.__version__}]), file=answers)
        for line in sys.stdin:
            print(json.dumps(compile_variant(todo[int(line)])), file=answers)


if __name__ == "__main__":
    main()
