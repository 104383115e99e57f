"""The memory check sees what it is there for: planted kernels that the interpreter alone lets pass."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import InterpreterError

from slipring.kernels.jit import tl, triton
from tests.kernels.memcheck import overflows


@triton.jit
def copy_kernel(X, Y, count, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, tl.load(X + at, at < count, 0), at < count)


@triton.jit
def add_up_kernel(TOTAL, ONES, N: tl.constexpr):
    tl.atomic_add(TOTAL + tl.arange(0, N), tl.load(ONES + tl.arange(0, N)))


@triton.jit
def shift_kernel(X, Y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, tl.load(X + at) >> at)


@triton.jit
def scale_kernel(X, Y):
    tl.store(Y, tl.load(X) * 65536)


def test_reads_and_writes_outside_are_seen() -> None:
    whole = torch.arange(64)
    x, y = whole[8:24], torch.zeros(16, dtype=torch.int64)
    copy_kernel[(1,)](x, y, 16, 32)
    assert torch.equal(x, y)
    for inputs in ((x[:15], y, 16), (x, y[:15], 16)):
        with pytest.raises(InterpreterError, match="1 of 16 addresses"):
            copy_kernel[(1,)](*inputs, 32)
    with pytest.raises(InterpreterError, match="addresses"):
        add_up_kernel[(1,)](torch.zeros(15), torch.ones(16), 16)


def test_a_shift_that_is_too_wide_is_seen() -> None:
    x = torch.ones(64, dtype=torch.int64)
    shift_kernel[(1,)](x, torch.empty_like(x), 64)
    with pytest.raises(InterpreterError, match="64 bits is shifted by 0 to 127"):
        shift_kernel[(1,)](x.repeat(2), torch.empty(128, dtype=torch.int64), 128)


def test_a_product_that_wraps_is_seen() -> None:
    x, y = torch.tensor([40000], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    scale_kernel[(1,)](x, y)
    with overflows(), pytest.raises(InterpreterError, match="overflow"):
        scale_kernel[(1,)](x, y)
