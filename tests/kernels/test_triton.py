"""Runs every kernel under Triton's interpreter (`triton_suite/`), in processes of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parent / "triton_suite"
ROOT = SUITE.parent.parent.parent
FILES = sorted(SUITE.glob("test_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("half", [0, 1])
def test_kernels_under_the_interpreter(half: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10"]
    environment = dict(os.environ, TRITON_INTERPRET="1")
    files = map(str, FILES[half::2])
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
