"""The GPU check's dry run, whole; its judgement of wrong, hung and dying checks; that no kernel is left out."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perf import gpu_check
from perf.figure import ROOT
from perf.gpu_case import Case, Maker, judge, spoiled
from perf.gpu_check import Child, choose
from perf.gpu_kernels import CHECKS as DENSE
from perf.gpu_kernels_state import CHECKS as STATE
from perf.gpu_served import Stream, breakdown
from perf.gpu_timing import rates

PROBED = {"comm", "all_to_all"}
"""Kernel files whose checks need ranks: `gpu_probes.py`."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_the_dry_run_finds_everything_in_order_and_times_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perf.gpu_check", "--dry", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    status = {check["name"]: check["status"] for check in record["checks"]}
    assert status.pop("roof") == "not available" and status.pop("served") in ("ok", "not available")
    assert set(status.values()) == {"ok"} and len(status) == len(DENSE) + len(STATE) + 3
    assert record["dry"] and record["device"] is None and record["roof"] == {} and record["versions"]["triton"]
    kernels = [check["result"] for check in record["checks"] if check["name"] in {c.name for c in (*DENSE, *STATE)}]
    assert not any("us" in part or "share_of_roof" in part for result in kernels for part in result.values())


def test_every_kernel_file_has_a_check() -> None:
    files = {path.stem for path in (ROOT / "kernels").glob("*.py")}
    with_kernels = {name for name in files if "\nSPECS" in (ROOT / "kernels" / f"{name}.py").read_text()}
    assert with_kernels == {check.kernels for check in (*DENSE, *STATE)} | PROBED
    names = [check.name for check in (*DENSE, *STATE)]
    assert len(set(names)) == len(names) and all(check.large for check in (*DENSE, *STATE))


def test_without_a_device_nothing_is_reported(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    command = [sys.executable, "-m", "perf.gpu_check", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not (tmp_path / "out.json").exists()


def case(tolerance: float | None, mismatches: float = 0.0) -> Case:
    return Case(tuple, tuple, tolerance, mismatches)


@pytest.mark.parametrize(
    ("ours", "expected", "tolerance", "right"),
    [
        ([1.0, 2.0], [1.0, 2.0], None, True),
        ([1.0, 2.0], [1.0, 2.001], None, False),
        ([1.0, 2.0], [1.0, 2.001], 0.01, True),
        ([100.0], [100.5], 0.01, True),  # relative beyond 1
        ([0.0], [0.02], 0.01, False),
        ([math.nan], [1.0], 1.0, False),
        ([math.nan], [math.nan], 1.0, False),
        ([-math.inf, 1.0], [-math.inf, 1.0001], 0.01, True),
        ([math.inf], [1.0], 0.01, False),
        ([1.0], [math.inf], 0.01, False),
    ],
)
def test_floats_are_judged(ours: list[float], expected: list[float], tolerance: float | None, right: bool) -> None:
    verdict = judge(case(tolerance), [torch.tensor(ours)], [torch.tensor(expected)])
    assert (verdict.problem == "") == right, verdict


def test_integers_and_shapes_are_judged() -> None:
    ours, expected = torch.arange(100), torch.arange(100)
    ours[3] = 0
    assert "1.00%" in judge(case(None), [ours], [expected]).problem
    assert not judge(case(None, 0.02), [ours], [expected]).problem
    assert "results are" in judge(case(1.0), [ours], [expected[:50]]).problem
    assert "results are" in judge(case(1.0), [ours.int()], [expected]).problem
    assert judge(case(None), spoiled([expected]), [expected]).problem


def test_large_cases_can_be_shaped_without_memory() -> None:
    for check in (*DENSE, *STATE):
        for label, arguments in check.large.items():
            large = check.build(Maker("meta"), *arguments)
            bound = large.nbytes if large.roof == "memory" else large.flops
            assert bound > 10**7 or large.roof == "none", (check.name, label)


def test_rates_are_shares_of_the_roof_that_was_measured() -> None:
    roof = {"memory_gb_per_s": 4000.0, "bf16_tflops": 800.0}
    assert rates(100.0, 10**8, 0, "memory", roof) == {"us": 100.0, "gb_per_s": 1000.0, "share_of_roof": 0.25}
    assert rates(100.0, 0, 4 * 10**10, "bf16", roof)["share_of_roof"] == 0.5
    assert "share_of_roof" not in rates(100.0, 0, 10**10, "fp8", roof)
    assert rates(7.0, 1, 1, "none", roof) == {"us": 7.0}


_FAKE = """
import json, os, sys, time
print(json.dumps({"device": None, "versions": {}, "checks": {"slow": 0.3, "dies": 9, "well": 9}}), flush=True)
for line in sys.stdin:
    name = json.loads(line)["name"]
    if name == "slow": time.sleep(60)
    if name == "dies": os._exit(3)
    print(json.dumps({"name": name, "status": "ok", "result": {}, "seconds": 0.1}), flush=True)
"""


def test_a_hung_and_a_dying_check_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Child.__init__
    monkeypatch.setattr(Child, "__init__", lambda self, dry: real(self, dry, ("-c", _FAKE)))
    record = gpu_check.run(dry=True)
    assert [check["status"] for check in record["checks"]] == ["timeout", "failed", "ok"]
    assert "0 s" in record["checks"][0]["detail"] and "died" in record["checks"][1]["detail"]
    monkeypatch.setattr(gpu_check, "TOTAL_SECONDS", 0.0)
    assert {check["status"] for check in gpu_check.run(dry=True)["checks"]} == {"skipped"}
    with pytest.raises(gpu_check.NoDevice):
        gpu_check.run(dry=False)


def test_names_are_chosen_by_their_beginnings() -> None:
    checks = {"roof": 1.0, "fp8_gemm.row": 1.0, "fp8_gemm.block": 1.0, "rmsnorm": 1.0}
    assert choose(checks, ("fp8",)) == ["roof", "fp8_gemm.row", "fp8_gemm.block"]
    assert choose(checks, ()) == list(checks)
    with pytest.raises(ValueError, match=r"no check begins with gemm; there are roof, fp8_gemm\.row"):
        choose(checks, ("gemm",))


def test_the_breakdown_is_of_decode_steps() -> None:
    rows = [[1, 40, 9000.0, 1.0, 9001.0]] + [[1, 1, 100.0 + i, 10.0, 120.0] for i in range(3)] + [[2, 2, 5.0, 1.0, 6.0]]
    found = breakdown(rows, Stream("x", 0.1, [200e-6] * 3))
    assert found == {
        "1_rows": {
            "steps": 3, "forward_us": 101.0, "sample_us": 10.0, "worker_us": 120.0, "engine_and_http_us": 80.0,
        }
    }  # fmt: skip
