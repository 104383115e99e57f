"""The compile gate on a few kernels: they pass, planted ones fail for their own reason, and broken workers are seen.

The whole gate is `python -m perf run compile-gate`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest

from perf import compile_gate
from perf.binary import Reading
from perf.compile_gate import LIMITS, problems, split

GOOD = {
    "sm_90": Reading(128, 0, 0, 100_000, 256, 8, ("HGMMA",), 128, ("bf16",)),
    "sm_100": Reading(128, 0, 0, 100_000, 256, 8, ("UTCHMMA",), 128, ("bf16",)),
    "gfx942": Reading(128, 0, 0, 60_000, 256, 8, ("v_mfma_f32_32x32x8_bf16",), 128, ("bf16",)),
}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_some_kernels_pass_and_planted_ones_fail() -> None:
    answers = compile_gate.compile_all(("comm.one_shot.world2", "rmsnorm"))
    own, failed, missed = split(answers)
    assert not failed and not missed
    assert {answer["architecture"] for answer in own} == set(LIMITS)
    planted = {(answer["name"], answer["architecture"]) for answer in answers if answer["planted"]}
    names = [f"planted.{fault}" for fault in ("shared", "matrix", "spill", "empty")]
    assert planted == set(itertools.product(names, LIMITS))


@pytest.mark.parametrize("architecture", LIMITS)
def test_a_good_reading_has_no_problem(architecture: str) -> None:
    assert problems(GOOD[architecture], "fp16", architecture) == []


@pytest.mark.parametrize("architecture", LIMITS)
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"spills": 1}, "spill"),
        ({"stack": 8}, "stack"),
        ({"shared": 232_449}, "shared"),
        ({"registers": 513}, "registers"),
        ({"threads": 2048}, "threads"),
        ({"matrix": ()}, "no matrix instruction"),
        ({"stores": 0}, "stores nothing"),
    ],
)
def test_each_limit_is_a_problem(architecture: str, change: dict[str, Any], word: str) -> None:
    reading = dataclasses.replace(GOOD[architecture], **change)
    assert any(word in words for words in problems(reading, "fp16", architecture))


@pytest.mark.parametrize(
    ("architecture", "rows", "matrix", "instruction", "good"),
    [
        ("sm_90", 128, "fp16", "HMMA", False),
        ("sm_90", 16, "fp16", "HMMA", True),
        ("sm_90", 128, "fp8", "QGMMA", True),
        ("sm_90", 128, "fp8", "HGMMA", False),
        ("sm_100", 128, "fp8", "UTCQMMA", True),
        ("sm_100", 128, "fp16", "HMMA", False),
        ("gfx942", 128, "fp8", "v_mfma_f32_32x32x16_fp8_fp8", True),
        ("gfx942", 128, "fp8", "v_mfma_f32_32x32x8_bf16", False),
        ("gfx942", 16, "fp16", "v_mfma_f32_16x16x16_f16", True),
    ],
)
def test_the_matrix_class_goes_by_type_and_height(
    architecture: str, rows: int, matrix: str, instruction: str, good: bool
) -> None:
    reading = dataclasses.replace(GOOD[architecture], matrix=(instruction,), dot_rows=rows)
    assert compile_gate.uses_matrix_units(reading, matrix, architecture) is good


def test_dots_that_a_spec_does_not_declare_are_a_problem() -> None:
    assert problems(GOOD["sm_90"], None, "sm_90") == ["undeclared dots of bf16"]
    assert not problems(dataclasses.replace(GOOD["sm_90"], dot_types=("f32",)), None, "sm_90")


@needs_triton
def test_a_compiler_that_dies_fails_its_variant_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_gate, "VARIANT_SECONDS", 0.0)
    worker = compile_gate.Worker(str(tmp_path))
    answer = worker.compile(0)
    assert "died" in answer["error"] and compile_gate.verdict(answer) == [answer["error"]]
    monkeypatch.setattr(compile_gate, "VARIANT_SECONDS", 60.0)
    assert "died" not in str(worker.compile(0))
    worker.close()


@needs_triton
def test_another_triton_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_gate, "TRITON", "0.0.0")
    with pytest.raises(RuntimeError, match=r"0\.0\.0"):
        compile_gate.Worker(str(tmp_path))
