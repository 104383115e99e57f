"""Each repair of the interpreter works, and is still needed. Fails on a Triton that no longer has a fault: then remove
that repair from `tests/kernels/interpreter.py`, and its probe here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from tests.kernels.interpreter import REPAIRS, without

N = 16


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 3


@triton.jit
def count_kernel(LIMIT, OUT):
    total = 0
    for i in range(tl.load(LIMIT)):
        total += i
    tl.store(OUT, total)


@triton.jit
def add_kernel(X, Y, OUT, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(OUT + at, tl.load(X + at) + tl.load(Y + at))


@triton.jit
def fma_kernel(X, Y, OUT, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(OUT + at, tl.fma(tl.load(X + at), tl.load(Y + at), tl.load(Y + at)))


@triton.jit
def dot_kernel(X, Y, OUT, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(OUT + at, tl.dot(tl.load(X + at), tl.load(Y + at)))


@triton.jit
def cast_kernel(X, OUT, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(OUT + at, tl.load(X + at).to(OUT.dtype.element_ty))


@triton.jit
def tf32_kernel(X, Y, OUT, PRECISION: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(OUT + at, tl.dot(tl.load(X + at), tl.load(Y + at), input_precision=PRECISION))


@triton.jit
def extreme_kernel(X, Y, OUT, LARGEST: tl.constexpr):
    at = tl.arange(0, 2)
    x, y = tl.load(X + at), tl.load(Y + at)
    tl.store(OUT + at, tl.maximum(x, y) if LARGEST else tl.minimum(x, y))


@triton.jit
def argmax_kernel(X, OUT, N: tl.constexpr):
    tl.store(OUT, tl.argmax(tl.load(X + tl.arange(0, N)), 0))


def counts() -> bool:
    out = torch.zeros(1, dtype=torch.int32)
    count_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    return int(out) == 10


def adds() -> bool:
    x, y = numbers(2, N).bfloat16()
    out = torch.empty_like(x)
    add_kernel[(1,)](x, y, out, N)
    return torch.equal(out, x + y)


def fuses_multiply_add() -> bool:
    x, y = numbers(2, N).bfloat16()
    out = torch.empty_like(x)
    fma_kernel[(1,)](x, y, out, N)
    return torch.equal(out, (x.float() * y.float() + y.float()).bfloat16())


def multiplies_matrices() -> bool:
    x, y = numbers(2, N, N).bfloat16()
    out = torch.empty(N, N)
    dot_kernel[(1,)](x, y, out, N)
    return torch.allclose(out, x.float() @ y.float(), atol=1e-4)


def rounds(dtype: torch.dtype) -> bool:
    x = torch.cat((numbers(1023) * 100, torch.tensor([1000.0])))
    out = torch.empty(1024, dtype=dtype)
    cast_kernel[(1,)](x, out, 1024)
    largest = torch.finfo(dtype).max
    return torch.equal(out.float(), x.clamp(-largest, largest).to(dtype).float())


def casts_integers() -> bool:
    x = torch.arange(-8, 8, dtype=torch.int32)
    as_bf16, back = torch.empty(N, dtype=torch.bfloat16), torch.empty_like(x)
    cast_kernel[(1,)](x, as_bf16, N)
    cast_kernel[(1,)](as_bf16, back, N)
    return torch.equal(as_bf16, x.bfloat16()) and torch.equal(back, x)


def multiplies_as_tf32() -> bool:
    """1 + 2^-12 has no place in ten bits; two parts of ten hold it."""
    x, y = torch.full((2, N, N), 1 + 2.0**-12)
    plain, split = torch.empty(2, N, N)
    tf32_kernel[(1,)](x, y, plain, "tf32", N)
    tf32_kernel[(1,)](x, y, split, "tf32x3", N)
    exact = N * (1 + 2.0**-12) ** 2
    return bool((plain == N).all()) and (split - exact).abs().max().item() < 1e-5


def drops_nan(largest: bool) -> bool:
    x, y = torch.tensor([[float("nan"), 1.0], [2.0, float("nan")]])
    out = torch.empty(2)
    extreme_kernel[(1,)](x, y, out, largest)
    return out.tolist() == [2.0, 1.0]


def finds_no_place_of_nan() -> bool:
    x, out = torch.arange(N).flip(0).float(), torch.empty(2, dtype=torch.int32)
    argmax_kernel[(1,)](x, out, N)
    x[3] = float("nan")
    argmax_kernel[(1,)](x, out[1:], N)
    return out.tolist() == [0, N - 1]


PROBES: dict[str, Callable[[], bool]] = {
    "numpy scalars": counts,
    "bf16 arithmetic": adds,
    "bf16 fma": fuses_multiply_add,
    "bf16 dot, fp32 dot in TF32": lambda: multiplies_matrices() and multiplies_as_tf32(),
    "maximum of NaN": lambda: drops_nan(True),
    "minimum of NaN": lambda: drops_nan(False),
    "argmax of NaN": finds_no_place_of_nan,
    "bf16 from and to integers": casts_integers,
    "rounding to bf16 and fp8": lambda: rounds(torch.bfloat16) and rounds(torch.float8_e4m3fn),
}


def right(probe: Callable[[], bool]) -> bool:
    try:
        return probe()
    except Exception:  # a fault may show as an error as well as a wrong number
        return False


@pytest.mark.parametrize("fault", REPAIRS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_each_repair_works_and_is_still_needed(fault: str) -> None:
    assert PROBES[fault]()
    with without(fault):
        assert not right(PROBES[fault]), f"Triton {triton.__version__} does without the repair {fault!r}: remove it"
    assert PROBES[fault]()
