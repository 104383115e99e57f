"""Weights that outlive workers: filled once, mapped by everybody, worth nothing until they are complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipring.kernels.linear import linear
from slipring.shm.weights import WeightFile, WeightSegment
from slipring.workers.loader import Weights
from slipring.workers.models.registry import build_model
from slipring.workers.weight_share import WeightShare
from tests.workers.tiny_models import save_tiny


def never_called() -> None:
    raise AssertionError("nobody fills, so nobody has to wait")


@pytest.fixture
def segment():
    made = WeightSegment()
    yield made
    made.close()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_weights_are_those_that_were_filled(
    tmp_path: Path, segment: WeightSegment, family: str, dtype: torch.dtype
) -> None:
    spec, _ = save_tiny(family, tmp_path)
    models = []
    for share in (None, "fills", "maps"):
        weights = Weights(spec, dtype, share=share and WeightShare(os.dup(segment.fd), never_called))
        if share == "maps":
            weights._fused = None  # type: ignore[assignment]  # nothing is read again
        models.append(build_model(spec, weights, 64))
        weights.close()
    own, filled, mapped = models
    x = torch.randn(3, spec.hidden_size).to(dtype)
    for other in (filled, mapped):
        assert torch.equal(own.embedding, other.embedding)
        assert torch.equal(linear(x, own.head), linear(x, other.head))
        for mine, theirs in zip(own.layers, other.layers, strict=True):
            assert torch.equal(mine.attention.qkv_proj.forward(x), theirs.attention.qkv_proj.forward(x))
            assert torch.equal(mine.mlp.gate_up_proj.forward(x), theirs.mlp.gate_up_proj.forward(x))
            assert torch.equal(mine.input_norm, theirs.input_norm)


FILLER = """
import sys, time
from slipring.shm.weights import WeightFile
file = WeightFile(int(sys.argv[1]))
assert file.try_lock()
file.begin()
file.append("half", memoryview(b"x" * 5000), "uint8", (5000,))
print("filling", flush=True)
time.sleep(60)
"""


def test_a_filler_killed_in_the_middle_leaves_nothing_that_counts(segment: WeightSegment) -> None:
    filler = subprocess.Popen(
        [sys.executable, "-c", FILLER, str(segment.fd)], pass_fds=[segment.fd], stdout=subprocess.PIPE, text=True
    )
    assert filler.stdout is not None and filler.stdout.readline() == "filling\n"
    file = WeightFile(segment.fd)
    assert not file.is_complete and not file.try_lock(), "while it lives it holds the lock"
    waits = []

    def wait() -> None:
        if not waits:
            filler.send_signal(signal.SIGKILL)
            filler.wait()
        waits.append(1)

    share = WeightShare(segment.fd, wait)
    assert waits and not share.is_filled
    made = share.tensor("whole", lambda: torch.arange(3000))
    share.finish()
    assert torch.equal(made, torch.arange(3000))
    again = WeightShare(segment.fd, never_called)
    assert again.is_filled and torch.equal(again.tensor("whole", never_called), made)  # type: ignore[arg-type]
    assert set(WeightFile(segment.fd).index()) == {"whole"}


def test_mapped_memory_cannot_be_written(segment: WeightSegment) -> None:
    share = WeightShare(segment.fd, never_called)
    share.tensor("x", lambda: torch.zeros(10))
    share.finish()
    script = (
        "import sys, torch\nfrom slipring.workers.weight_share import WeightShare\n"
        "WeightShare(int(sys.argv[1]), print).tensor('x', print).fill_(1)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(segment.fd)], pass_fds=[segment.fd])
    assert done.returncode == -signal.SIGSEGV
    assert share.tensor("x", never_called).sum() == 0  # type: ignore[arg-type]


def test_mapped_weights_take_no_descriptors(segment: WeightSegment) -> None:
    share, before = WeightShare(segment.fd, never_called), len(os.listdir("/proc/self/fd"))
    kept = [share.tensor(str(number), lambda: torch.ones(5)) for number in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert sum(float(tensor.sum()) for tensor in kept) == 250


def test_a_renewed_segment_is_empty(segment: WeightSegment) -> None:
    share = WeightShare(os.dup(segment.fd), never_called)
    share.tensor("x", lambda: torch.zeros(1))
    share.finish()
    assert WeightFile(segment.fd).is_complete
    segment.renew()
    assert not WeightFile(segment.fd).is_complete
