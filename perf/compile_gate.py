"""Every kernel, compiled ahead of time for every architecture, and judged by its binary. No GPU is needed.

The gate fails a variant for a compile error, spilled registers, a stack, more shared memory, registers or threads than
the architecture has, matrix units left unused, or a binary that stores nothing. Planted kernels must fail on every
architecture, each for its own reason; otherwise the gate itself is broken. It compiles from an empty cache in two
child processes, because a process in which kernels can be compiled has SLIPRING_COMPILE_KERNELS set before anything is
imported.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from perf.binary import Reading
from perf.figure import ROOT, Measurement, Options

DESCRIPTION = (
    "every kernel compiled for sm_90, sm_100 and gfx942: registers, spills, shared memory, matrix instructions"
)
TRITON = "3.6.0"
"""Verdicts near a limit differ from version to version, so they hold for this one."""
PROCESSES = 2
VARIANT_SECONDS = 120.0


@dataclass(frozen=True)
class Limits:
    shared: int
    """Bytes of shared memory (LDS) that one program can have."""
    registers: int
    """For each thread."""
    register_file: int
    """32-bit registers that the threads of one program share."""
    wide: dict[str, str]
    """Matrix class -> instruction that a tl.dot of 64 rows or more must become."""
    narrow: dict[str, str]
    """... and one of fewer rows; alternatives are separated by spaces. Prefixes, both."""


_HOPPER_NARROW = {"fp16": "HMMA", "fp8": "QMMA HMMA", "int8": "IMMA"}
_MFMA = {
    "fp16": "v_mfma_f32_ bf16 f16",
    "fp8": "v_mfma_f32_ fp8_fp8 fp8_bf8 bf8_bf8",
    "int8": "v_mfma_i32_ i8",
}
"""AMD: prefix, then what the name may end with."""
LIMITS = {
    "sm_90": Limits(232448, 255, 65536, {"fp16": "HGMMA", "fp8": "QGMMA", "int8": "IGMMA"}, _HOPPER_NARROW),
    # Blackwell's tcgen05 units take no int8 from Triton 3.6; the warp-level instruction is what there is.
    "sm_100": Limits(232448, 255, 65536, {"fp16": "UTCHMMA", "fp8": "UTCQMMA", "int8": "UTCIMMA IMMA"}, _HOPPER_NARROW),
    # Four SIMDs with 512 vector registers for each of 64 lanes.
    "gfx942": Limits(65536, 512, 131072, _MFMA, _MFMA),
}


def problems(reading: Reading, matrix: str | None, architecture: str) -> list[str]:
    """What is wrong with a binary, in words; empty when it may be launched."""
    limits = LIMITS[architecture]
    file = reading.registers * reading.threads
    findings = (
        (reading.spills > 0, f"{reading.spills} spills"),
        (reading.stack > 0, f"{reading.stack} bytes of stack"),
        (reading.shared > limits.shared, f"{reading.shared} bytes of shared memory, limit {limits.shared}"),
        (reading.registers > limits.registers, f"{reading.registers} registers, limit {limits.registers}"),
        (file > limits.register_file, f"{file} registers in all, limit {limits.register_file}"),
        (reading.threads > 1024, f"{reading.threads} threads"),
        (reading.stores == 0, "the binary stores nothing"),
        (not uses_matrix_units(reading, matrix, architecture), _unused(reading, matrix)),
        (
            matrix is None and not set(reading.dot_types) <= {"f32"},
            f"undeclared dots of {', '.join(reading.dot_types)}",
        ),
    )
    return [words for wrong, words in findings if wrong]


def uses_matrix_units(reading: Reading, matrix: str | None, architecture: str) -> bool:
    """Whether the binary holds the instruction that its class and the height of its dots ask for."""
    if matrix is None:
        return True
    limits = LIMITS[architecture]
    names = (limits.wide if reading.dot_rows >= 64 else limits.narrow)[matrix].split()
    if architecture.startswith("gfx"):
        prefix, *endings = names
        return any(found.startswith(prefix) and found.endswith(tuple(endings)) for found in reading.matrix)
    return any(name in reading.matrix for name in names)


def _unused(reading: Reading, matrix: str | None) -> str:
    found = ", ".join(reading.matrix) or "no matrix instruction"
    return f"{matrix} dots of up to {reading.dot_rows} rows became {found}"


def verdict(answer: dict[str, Any]) -> list[str]:
    """Problems of a worker's answer."""
    if "error" in answer:
        return [answer["error"]]
    return problems(Reading(**answer["reading"]), answer["matrix"], answer["architecture"])


class Worker:
    """A child process that compiles one variant after another; replaced when it dies."""

    def __init__(self, cache: str) -> None:
        self._environment = dict(os.environ, SLIPRING_COMPILE_KERNELS="1", TRITON_CACHE_DIR=cache)
        self._environment.pop("TRITON_INTERPRET", None)
        self.variants: list[dict[str, Any]] = []
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perf.compile_worker"],
            cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        first = self._answer()
        if not first:
            raise RuntimeError("the compile worker did not start; what it said is above")
        *variants, versions = json.loads(first)
        if self.variants and variants != self.variants:
            raise RuntimeError("kernel files changed while the gate ran")
        self.variants = variants
        if versions["triton"] != TRITON:
            self.close()
            raise RuntimeError(f"the gate's verdicts are for Triton {TRITON}, found {versions['triton']}")

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def compile(self, index: int) -> dict[str, Any]:
        """The worker's answer, or one that says how it ended."""
        assert self._process.stdin
        timer = threading.Timer(VARIANT_SECONDS, self._process.kill)
        timer.start()
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        line = self._answer()
        timer.cancel()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._start()
        return self.variants[index] | {"error": f"the compiler died with status {status}", "seconds": 0.0}

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compile_all(only: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Answers for every variant whose name begins with one of `only` (all, without), planted ones always included."""
    prefixes = tuple(only)
    with tempfile.TemporaryDirectory(prefix="slipring-gate-") as cache, ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(cache))) for _ in range(PROCESSES)]
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index, variant in enumerate(workers[0].variants):
            if not prefixes or variant["planted"] or variant["name"].startswith(prefixes):
                todo.put(index)
        with ThreadPoolExecutor(PROCESSES) as pool:
            shares = list(pool.map(_drain, workers, [todo] * PROCESSES))
    return [answer for share in shares for answer in share]


def _drain(worker: Worker, todo: queue.SimpleQueue[int]) -> list[dict[str, Any]]:
    answers = []
    while True:
        try:
            index = todo.get_nowait()
        except queue.Empty:
            return answers
        answers.append(worker.compile(index))


def split(answers: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """(the engine's own answers, lines on those that fail, lines on planted ones that were let through)."""
    own = [answer for answer in answers if not answer["planted"]]
    failed = [_line(answer) for answer in own if verdict(answer)]
    missed = [
        _line(answer)
        for answer in answers
        if answer["planted"] and not any(answer["planted"] in words for words in verdict(answer))
    ]
    return own, failed, missed


def _line(answer: dict[str, Any]) -> str:
    return f"{answer['name']} on {answer['architecture']}: {'; '.join(verdict(answer)) or 'no problem found'}"


def measure(options: Options) -> Measurement:
    """Raises AssertionError, naming each, when a variant fails or a planted kernel does not."""
    began = time.monotonic()
    answers = compile_all(("rmsnorm", "comm.") if options.quick else ())
    own, failed, missed = split(answers)
    seconds = round(time.monotonic() - began, 1)
    assert own, "no kernel has SPECS"
    summary = {
        "kernels": len({answer["kernel"] for answer in own}),
        "variants": len(own),
        "architectures": len({answer["architecture"] for answer in own}),
        "failed": len(failed),
        "planted_failed": len(answers) - len(own) - len(missed),
        "seconds": seconds,
    }
    assert not failed, f"{summary}\n" + "\n".join(failed)
    assert not missed, f"planted kernels were let through: {missed}"
    samples = {"seconds": [answer["seconds"] for answer in own]}
    return Measurement(summary, _table(own), samples, f"Triton {TRITON}, empty cache, {PROCESSES} processes")


def _table(own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an architecture: the worst of each reading."""
    rows = []
    for architecture in LIMITS:
        readings = [answer["reading"] for answer in own if answer["architecture"] == architecture]
        rows.append(
            {
                "architecture": architecture,
                "variants": len(readings),
                "registers": max(reading["registers"] for reading in readings),
                "spills": sum(reading["spills"] for reading in readings),
                "shared_kib": round(max(reading["shared"] for reading in readings) / 1024, 1),
                "shared_limit_kib": LIMITS[architecture].shared // 1024,
            }
        )
    return rows
