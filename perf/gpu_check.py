"""One command for the day a GPU is there: `python -m perf.gpu_check [--only NAME ...] [--dry] [--json OUT]`.

Every kernel against its reference on the device and its share of the measured roof, a decode step as a captured graph,
collectives between two streams and two processes, and a small model served end to end. `--only` takes the beginnings
of names. Every check has a time budget and all together 300 s; what does not fit is reported as skipped, what the
machine lacks as not available: nothing is made up. `--dry` runs here, without a GPU: it builds every input, runs each
kernel under Triton's interpreter, proves that each comparison sees a wrong result, and times nothing.

Checks run in a child process (`gpu_worker.py`), which is replaced when a check hangs or breaks the CUDA context.
Exit code: 0 when nothing failed, 1 when something did, 2 when there is no device.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perf.figure import ROOT, commit, machine
from perf.gpu_served import die_with_parent

TOTAL_SECONDS = 300.0
START_SECONDS = 90.0
"""Importing torch and Triton and making a context, on a machine that has never done it."""


class Child:
    """The process in which checks run."""

    def __init__(self, dry: bool, program: tuple[str, ...] = ("-m", "perf.gpu_worker")) -> None:
        environment = dict(os.environ)
        if dry:
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *program, *(["--dry"] if dry else [])], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, preexec_fn=die_with_parent,
        )  # fmt: skip
        self._rest = b""
        said = self._line(START_SECONDS)
        if not said:
            self.close()
            raise RuntimeError("the process for the checks did not start; what it said is above")
        self.hello: dict[str, Any] = json.loads(said)

    def ask(self, name: str, roof: dict[str, float], seconds: float) -> dict[str, Any]:
        """The answer, or one that says how the process ended; `fatal` then."""
        assert self._process.stdin
        began = time.monotonic()
        self._process.stdin.write(json.dumps({"name": name, "roof": roof}).encode() + b"\n")
        if said := self._line(seconds):
            return json.loads(said)
        hung = self._process.poll() is None
        status = "timeout" if hung else "failed"
        detail = f"no answer within {seconds:.0f} s" if hung else "the process died: the last lines above say of what"
        taken = round(time.monotonic() - began, 2)
        return {"name": name, "status": status, "detail": detail, "seconds": taken, "fatal": True}

    def _line(self, seconds: float) -> bytes:
        """One line of the child's, or nothing when it hangs or is gone."""
        assert self._process.stdout
        deadline = time.monotonic() + seconds
        poll = select.poll()  # select() knows no descriptors above 1023
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._rest:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            piece = self._process.stdout.read(65536) if ready else b""
            if not piece:
                if ready:
                    self._process.wait()
                return b""
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run(dry: bool, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """The whole record. Raises NoDevice, ValueError for names that begin no check."""
    began = time.monotonic()
    child = Child(dry)
    try:
        hello = child.hello
        if hello["device"] is None and not dry:
            raise NoDevice
        names = choose(hello["checks"], only)
        record: dict[str, Any] = {
            "command": "gpu_check", "dry": dry, "date": time.strftime("%Y-%m-%d"),
            "commit": commit(), "machine": machine(), "device": hello["device"], "versions": hello["versions"],
            "only": list(only),
        }  # fmt: skip
        roof: dict[str, float] = {}
        answers: list[dict[str, Any]] = []
        for name in names:
            left = TOTAL_SECONDS - (time.monotonic() - began)
            said = skipped(name) if left < 1 else child.ask(name, roof, min(left, hello["checks"][name]))
            if name == "roof":
                roof = said.get("result", {})
            answers.append(said)
            print(line(said), flush=True)
            if said.pop("fatal", False):
                child.close()
                child = Child(dry)
    finally:
        child.close()
    return record | {"seconds": round(time.monotonic() - began, 1), "roof": roof, "checks": answers}


class NoDevice(Exception):
    """There is no CUDA device, and this was no `--dry`."""


def choose(checks: dict[str, float], only: tuple[str, ...]) -> list[str]:
    if unknown := [prefix for prefix in only if not any(name.startswith(prefix) for name in checks)]:
        raise ValueError(f"no check begins with {', '.join(unknown)}; there are {', '.join(checks)}")
    # Shares are of the roof, so that is measured in every run.
    return [name for name in checks if not only or name == "roof" or name.startswith(only)]


def skipped(name: str) -> dict[str, Any]:
    return {"name": name, "status": "skipped", "detail": f"the {TOTAL_SECONDS:.0f} s are over", "seconds": 0.0}


def line(said: dict[str, Any]) -> str:
    head = f"{said['status']:13} {said['name']:24} {said['seconds']:6.1f} s"
    if "detail" in said:
        return f"{head}  {said['detail']}"
    return f"{head}  {json.dumps(said['result'])}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.gpu_check", description="Checks every GPU part on a GPU.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="checks whose names begin so")
    parser.add_argument("--dry", action="store_true", help="without a GPU: inputs, references, comparisons")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the record goes")
    arguments = parser.parse_args(argv)
    try:
        record = run(arguments.dry, tuple(arguments.only))
    except NoDevice:
        print("no CUDA device here; `--dry` checks everything but the device", file=sys.stderr)
        return 2
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    counts: dict[str, int] = {}
    for said in record["checks"]:
        counts[said["status"]] = counts.get(said["status"], 0) + 1
    print(json.dumps({"dry": record["dry"], "seconds": record["seconds"], "roof": record["roof"]} | counts))
    return 1 if counts.keys() & {"failed", "timeout"} else 0


if __name__ == "__main__":
    sys.exit(main())
