"""Runs every kernel under Triton's interpreter (`triton_suite/`) in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "triton_suite"
ROOT = SUITE.parent.parent.parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10"]
    environment = dict(os.environ, TRITON_INTERPRET="1")
    files = sorted(map(str, SUITE.glob("test_*.py")))
    # The interpreter is one thread's work: two halves, side by side.
    halves = [
        subprocess.Popen(
            command + half, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for half in (files[::2], files[1::2])
    ]
    outputs = [half.communicate()[0] for half in halves]
    assert [half.returncode for half in halves] == [0, 0], "\n".join(outputs)
