"""Interpreter tests: collected only with TRITON_INTERPRET=1, which `tests/kernels/test_triton.py` sets in a process
of their own (an interpreted kernel cannot be compiled, and a compiled one cannot run here)."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []

if os.environ.get("TRITON_INTERPRET") == "1":
    import torch

    from tests.kernels.interpreter import repair
    from tests.kernels.memcheck import watch

    torch.set_num_threads(1)
    repair()
    watch()
else:
    collect_ignore_glob.append("*")
