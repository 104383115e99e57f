"""The process in which GPU checks run: `python -m perf.gpu_worker [--dry]`.

It says what it is in one line of JSON, then answers each line `{"name", "roof"}` on stdin with one line. A check that
hangs or breaks the CUDA context takes only this process with it; `gpu_check.py` starts another.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import Any

import torch

from perf.figure import versions
from perf.gpu_case import Case, Check, Maker, judge, spoiled
from perf.gpu_kernels import CHECKS as DENSE
from perf.gpu_kernels_state import CHECKS as STATE
from perf.gpu_probes import PROBES, Setting, roof
from perf.gpu_served import NotAvailable
from perf.gpu_timing import describe_device, rates, time_us

KERNELS = {check.name: check for check in (*DENSE, *STATE)}
KERNEL_SECONDS = 30.0
"""A kernel check may take so long: three compilations, references on the CPU, and the timing."""


def catalogue() -> dict[str, float]:
    """Name -> seconds it may take, in the order in which they run."""
    kernels = dict.fromkeys(KERNELS, KERNEL_SECONDS)
    return {"roof": 30.0} | kernels | {name: seconds for name, (_, seconds) in PROBES.items()}


def answer(name: str, setting: Setting) -> dict[str, Any]:
    """`status` is ok, failed or not available; `fatal` asks for a new process."""
    began, said = time.monotonic(), {"name": name}
    try:
        found = check_kernel(KERNELS[name], setting) if name in KERNELS else _probe(name)(setting)
        said |= {"status": "ok", "result": found}
    except NotAvailable as error:
        said |= {"status": "not available", "detail": str(error)}
    except AssertionError as error:
        said |= {"status": "failed", "detail": str(error) or traceback.format_exc(limit=-2)}
    except Exception as error:  # whatever a check raises is its finding; the device may be lost with it
        said |= {"status": "failed", "detail": f"{type(error).__name__}: {error}"[:600], "fatal": not setting.dry}
        traceback.print_exc()
    return said | {"seconds": round(time.monotonic() - began, 2)}


def _probe(name: str) -> Any:
    return roof if name == "roof" else PROBES[name][0]


def check_kernel(check: Check, setting: Setting) -> dict[str, Any]:
    """Small and exact first, then each large size: compared, then timed. Under `--dry` large ones are only shaped."""
    found: dict[str, Any] = {"small": compare(check.build(Maker(setting.device), *check.small), setting.dry)}
    for label, arguments in check.large.items():
        case = check.build(Maker("meta" if setting.dry else "cuda"), *arguments)
        if setting.dry:
            found[label] = {"nbytes": case.nbytes, "flops": case.flops, "timed": False}
            continue
        found[label] = compare(case, False)
        us, how = time_us(case.run)
        found[label] |= rates(us, case.nbytes, case.flops, case.roof, setting.roof) | {"timed": how}
        del case
        torch.cuda.empty_cache()
    return found


def compare(case: Case, prove: bool) -> dict[str, Any]:
    """Raises AssertionError when the kernel is wrong; with `prove` also when the comparison lets a wrong one pass."""
    expected = case.ref()
    ours = case.pick(case.run())
    verdict = judge(case, ours, expected)
    assert not verdict.problem, verdict.problem
    if prove:
        assert judge(case, spoiled(expected), expected).problem, "the comparison does not see a wrong result"
    return {name: value for name, value in asdict(verdict).items() if name != "problem"}


def hello(dry: bool) -> dict[str, Any]:
    known = versions()
    for name in ("triton", "cupy-cuda13x"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            known[name] = "not installed"
    found = not dry and torch.cuda.is_available()
    return {"device": describe_device() if found else None, "versions": known, "checks": catalogue()}


def main() -> None:
    dry = "--dry" in sys.argv[1:]
    if dry:
        assert os.environ.get("TRITON_INTERPRET") == "1", "gpu_check.py sets it"
        from tests.kernels.interpreter import repair

        torch.set_num_threads(1)
        repair()
    # Whatever a check prints goes to stderr; the protocol keeps a descriptor of its own.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        print(json.dumps(hello(dry)), file=answers)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(answer(asked["name"], Setting(dry, asked["roof"]))), file=answers)


if __name__ == "__main__":
    main()
