"""Runs `fake_cuda.py`: the CUDA runner's steps mix no devices, wait for nothing, and launch the kernels meant."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
KERNELS = {
    "_append_blocks_kernel", "_assign_kernel", "_commit_tokens_kernel", "_decode_inputs_kernel", "_logprobs_kernel",
    "_partial_kernel", "_prefill_kernel", "_rmsnorm_kernel", "_rope_store_kv_kernel", "_silu_mul_kernel",
    "draw_kernel", "penalties_kernel", "token_mask_kernel",
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama-biases", set()),
        ("qwen3", set()),
        ("awq", {"int4_gemm_kernel"}),
        ("fp8-channel", {"quantize_token_kernel", "fp8_gemm_kernel"}),
    ],
)
def test_steps_over_fake_cuda_tensors(family: str, more: set[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kernels.fake_cuda", family, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == KERNELS | more
