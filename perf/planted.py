"""Kernels that the compile gate must fail, one for each thing it looks at: proof that it can.

Imported only by `compile_worker.py`, where Triton is present. Each is a `KernelSpec` and a word that must be among the
problems found.
"""

from __future__ import annotations

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register


@triton.jit
def matmul(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        k = begin + tl.arange(0, BK)
        a = tl.load(A + m[:, None] * K + k[None, :])
        total = tl.dot(a, tl.load(B + k[:, None] * N + n[None, :]), total)
    tl.store(C + m[:, None] * N + n[None, :], total.to(C.dtype.element_ty))


@triton.jit
def softmax_in_registers(X, Y, BLOCK: tl.constexpr):
    x = tl.load(X + tl.arange(0, BLOCK))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + tl.arange(0, BLOCK), e / tl.sum(e, 0))


@triton.jit
def leaves_nothing(X, Y, BLOCK: tl.constexpr):
    """The branch that stores is never taken, as the compiler knows: all that led to it goes with it."""
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    if BLOCK < 0:
        tl.store(Y + at, x / tl.sum(x, 0))


register("planted.shared", any={"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 5})
register("planted.matrix", any={"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2})
# 8192 numbers in one warp, 256 a thread; on AMD, 128 a thread where sixteen waves leave 128 registers for each.
register(
    "planted.spill",
    any={"BLOCK": 8192, "num_warps": 1, "num_stages": 1},
    gfx942={"BLOCK": 131072, "num_warps": 16, "num_stages": 1},
)

register("planted.empty", any={"BLOCK": 1024, "num_warps": 4, "num_stages": 1})

_MATMUL = {"A": "*bf16", "B": "*bf16", "C": "*bf16", "M": "i32", "N": "i32", "K": "i32"}
_ALIGNED = ("A", "B", "C", "M", "N", "K")
PLANTED = (
    (KernelSpec("planted.shared", matmul, _MATMUL, {}, "planted.shared", "fp16", _ALIGNED), "shared"),
    (KernelSpec("planted.matrix", matmul, _MATMUL, {}, "planted.matrix", "fp8", _ALIGNED), "fp8"),
    (
        KernelSpec(
            "planted.spill", softmax_in_registers, {"X": "*fp32", "Y": "*fp32"}, {}, "planted.spill", None, ("X", "Y")
        ),
        "spill",
    ),
    (
        KernelSpec(
            "planted.empty", leaves_nothing, {"X": "*fp32", "Y": "*fp32"}, {}, "planted.empty", None, ("X", "Y")
        ),
        "stores nothing",
    ),
)
"""(spec, a word of the problem that must be found)."""
