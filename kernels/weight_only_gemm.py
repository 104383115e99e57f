"""`y = x W^T` with W in int4 or int8, scales (and optional zero points) by group, and x in 16 or 32 bits.

Our layout (`QuantizedWeight`): unsigned codes q, row-major [N, ...] like an ordinary weight, and
`W[n, k] = (q[n, k] - zero) * scale[k // group_size, n]`. Without zeros the zero point is the middle, 8 or 128. int4
codes lie in pairs that never need interleaving: a span of 64 columns takes 32 bytes, whose low nibbles are its first
32 columns and whose high nibbles are its last, so a kernel multiplies each half with its own columns of x.

Checkpoints in AWQ's and GPTQ's layouts become ours at load (`from_awq`, `from_gptq`): pure functions, any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles

SPAN = 64
"""Columns that share 32 bytes of int4 codes."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AWQ word that holds its i-th column (AutoAWQ packs columns 0 2 4 6 1 3 5 7 from the lowest nibble)."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] in our layout."""

    codes: Tensor
    """uint8: [N, K] for 8 bits, [N, K / 2] for 4."""
    scales: Tensor
    """[K / group_size, N], float."""
    zeros: Tensor | None
    """uint8, shaped as scales; None: the middle of the range."""
    bits: int
    group_size: int
    order: Tensor | None = None
    """int64 [K]: the columns of W, and so of x, are taken in this order (GPTQ's `desc_act`)."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * (8 // self.bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K] uint8, below 2^bits -> the layout's bytes. Raises ValueError for bits or a K that cannot be had."""
    if bits == 8:
        return codes.contiguous()
    if bits != 4 or codes.shape[1] % SPAN:
        raise ValueError(
            f"weight-only int{bits} with {codes.shape[1]} columns: want 4 or 8 bits, K a multiple of {SPAN}"
        )
    low, high = codes.view(codes.shape[0], -1, 2, SPAN // 2).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    if bits == 8:
        return packed
    spans = packed.view(packed.shape[0], -1, SPAN // 2)
    return torch.stack((spans & 15, spans >> 4), 2).flatten(1)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """AWQ's int4: qweight [K, N / 8] and qzeros [K / g, N / 8] int32, scales [K / g, N]."""
    codes = _nibbles(qweight, _AWQ_ORDER).T
    group_size = codes.shape[1] // scales.shape[0]
    zeros = _nibbles(qzeros, _AWQ_ORDER).contiguous()
    return QuantizedWeight(pack_codes(codes.contiguous(), 4), scales.contiguous(), zeros, 4, group_size)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, bits: int, g_idx: Tensor | None = None, zeros_less_one: bool = True
) -> QuantizedWeight:
    """GPTQ: qweight [K * bits / 32, N] and qzeros [K / g, N * bits / 32] int32, scales [K / g, N], g_idx [K].

    `zeros_less_one`: the `gptq` format stores zero - 1; `gptq_v2` does not.
    """
    codes = _unpack_words(qweight.T, bits)
    group_size = codes.shape[1] // scales.shape[0]
    zeros = _unpack_words(qzeros, bits) + int(zeros_less_one)
    order = None
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(len(g_idx), device=g_idx.device) // group_size):
        order = g_idx.long().argsort(stable=True)
        codes = codes[:, order]
    middle = bool((zeros == 2 ** (bits - 1)).all())
    packed = pack_codes(codes, bits)
    return QuantizedWeight(packed, scales.contiguous(), None if middle else zeros, bits, group_size, order)


def _nibbles(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """[R, C] int32 -> [R, 8 C] uint8; column i of a word is its nibble order[i]."""
    shifts = torch.tensor(order, device=words.device, dtype=torch.int32) * 4
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(1)


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """[R, C] int32 -> [R, C * 32 / bits] uint8, lowest bits first."""
    if bits not in (4, 8):
        raise ValueError(f"weight-only int{bits}: want 4 or 8 bits")
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """-> [N, K] of `dtype`, columns in `weight.order`."""
    codes = unpack_codes(weight.codes, weight.bits).float()
    zeros = 2.0 ** (weight.bits - 1) if weight.zeros is None else _spread(weight.zeros, weight.group_size)
    return ((codes - zeros) * _spread(weight.scales, weight.group_size)).to(dtype)


def _spread(by_group: Tensor, group_size: int) -> Tensor:
    """[K / g, N] -> [N, K] float32."""
    return by_group.float().T.repeat_interleave(group_size, 1)


def weight_only_gemm_ref(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K], bias [N] -> [M, N] of x's dtype. The weight is rounded to x's dtype before it is multiplied."""
    x = x if weight.order is None else x[:, weight.order]
    y = x.float() @ dequantize(weight, x.dtype).float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


@triton.jit
def _dequantized(
    codes, SCALES, ZEROS, inner, column, K, N, group_size,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, ONE_GROUP: tl.constexpr,
):  # fmt: skip
    """codes [BK, BN] of the columns `inner` of W -> float32. ONE_GROUP: all of `inner` has one group."""
    group = inner // group_size
    if ONE_GROUP:
        group = tl.min(group, 0) + tl.zeros([1], tl.int32)
    at = group[:, None] * N + column[None, :]
    mask = (group < K // group_size)[:, None] & (column < N)[None, :]
    scale = tl.load(SCALES + at, mask, 0.0).to(tl.float32)
    if HAS_ZEROS:
        return (codes.to(tl.float32) - tl.load(ZEROS + at, mask, 0).to(tl.float32)) * scale
    return (codes.to(tl.float32) - MIDDLE) * scale


# The number of tokens is no reason to compile anew: that would happen in the middle of serving.
@triton.jit(do_not_specialize=["M"])
def int4_gemm_kernel(
    X, CODES, SCALES, ZEROS, BIAS, Y, M, N, K, group_size,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BK columns of W a step, BK / 2 in each nibble."""
    HALF: tl.constexpr = BK // 2
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    byte = tl.arange(0, HALF)
    code_at = CODES + column.to(tl.int64)[None, :] * (K // 2) + byte[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        low = begin + byte // 32 * 64 + byte % 32
        high = low + 32
        pairs = tl.load(code_at, (column < N)[None, :] & (low < K)[:, None], 0)
        x_at = X + row.to(tl.int64)[:, None] * K + low[None, :]
        mask = (row < M)[:, None] & (low < K)[None, :]
        w = _dequantized(pairs & 15, SCALES, ZEROS, low, column, K, N, group_size, 8, HAS_ZEROS, ONE_GROUP)
        total = tl.dot(tl.load(x_at, mask, 0.0), w.to(X.dtype.element_ty), total, input_precision="ieee")
        w = _dequantized(pairs >> 4, SCALES, ZEROS, high, column, K, N, group_size, 8, HAS_ZEROS, ONE_GROUP)
        total = tl.dot(tl.load(x_at + 32, mask, 0.0), w.to(X.dtype.element_ty), total, input_precision="ieee")
        code_at += HALF
    if HAS_BIAS:
        total += tl.load(BIAS + column, column < N, 0.0).to(tl.float32)[None, :]
    y_at = Y + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_at, total.to(Y.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def int8_gemm_kernel(
    X, CODES, SCALES, ZEROS, BIAS, Y, M, N, K, group_size,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ONE_GROUP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for begin in range(0, K, BK):
        inner = begin + tl.arange(0, BK)
        code_at = CODES + column.to(tl.int64)[None, :] * K + inner[:, None]
        codes = tl.load(code_at, (column < N)[None, :] & (inner < K)[:, None], 0)
        w = _dequantized(codes, SCALES, ZEROS, inner, column, K, N, group_size, 128, HAS_ZEROS, ONE_GROUP)
        x_at = X + row.to(tl.int64)[:, None] * K + inner[None, :]
        x = tl.load(x_at, (row < M)[:, None] & (inner < K)[None, :], 0.0)
        total = tl.dot(x, w.to(X.dtype.element_ty), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(BIAS + column, column < N, 0.0).to(tl.float32)[None, :]
    y_at = Y + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(y_at, total.to(Y.dtype.element_ty), (row < M)[:, None] & (column < N)[None, :])


def _register(bits: int) -> None:
    def row(bm: int, bn: int, bk: int, num_warps: int, num_stages: int) -> dict[str, int]:
        return {"BM": bm, "BN": bn, "BK": bk, "num_warps": num_warps, "num_stages": num_stages}

    register(f"int{bits}_gemm.few_rows", any=row(16, 64, 128, 4, 3), gfx942=row(16, 64, 128, 4, 2))
    register(f"int{bits}_gemm.some_rows", any=row(64, 64, 128, 4, 3), gfx942=row(64, 64, 64, 4, 2))
    register(f"int{bits}_gemm.many_rows", any=row(128, 128, 64, 8, 3), gfx942=row(128, 128, 64, 8, 2))
    register(f"int{bits}_gemm.small_groups", any=row(64, 64, 64, 4, 3), gfx942=row(64, 64, 64, 4, 2))


_register(4)
_register(8)


def _tile(num_rows: int, weight: QuantizedWeight) -> tuple[dict[str, int], bool]:
    """(tile, whether a step of it lies in one group). Every kernel but that for small groups relies on that."""
    rows = "few_rows" if num_rows <= 16 else "some_rows" if num_rows <= 64 else "many_rows"
    tile = tiles(f"int{weight.bits}_gemm.{rows}")
    if weight.group_size % tile["BK"] == 0:
        return tile, True
    return tiles(f"int{weight.bits}_gemm.small_groups"), False


def weight_only_gemm_triton(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As `weight_only_gemm_ref`; x contiguous."""
    # index_select, whose result is contiguous; that of x[:, order] need not be.
    x = x if weight.order is None else x.index_select(1, weight.order)
    m, (n, k) = x.shape[0], weight.shape
    y = torch.empty(m, n, device=x.device, dtype=x.dtype)
    tile, one_group = _tile(m, weight)
    kernel = int4_gemm_kernel if weight.bits == 4 else int8_gemm_kernel
    zeros, biases = (absent if given is None else given for given, absent in ((weight.zeros, weight.codes), (bias, y)))
    kernel[triton.cdiv(m, tile["BM"]), triton.cdiv(n, tile["BN"])](
        x, weight.codes, weight.scales, zeros, biases, y, m, n, k, weight.group_size,
        HAS_ZEROS=weight.zeros is not None, HAS_BIAS=bias is not None,
        ONE_GROUP=one_group, **tile,
    )  # fmt: skip
    return y


def weight_only_gemm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """As `weight_only_gemm_ref`, on whatever device the tensors are."""
    return (weight_only_gemm_triton if x.is_cuda else weight_only_gemm_ref)(x, weight, bias)


def _specs() -> tuple[KernelSpec, ...]:
    types = {name: "*bf16" for name in ("X", "SCALES", "BIAS", "Y")} | {"CODES": "*u8", "ZEROS": "*u8"}
    types |= {name: "i32" for name in ("M", "N", "K", "group_size")}
    aligned = ("X", "CODES", "SCALES", "ZEROS", "BIAS", "Y", "N", "K", "group_size")
    found = []
    for bits, kernel in ((4, int4_gemm_kernel), (8, int8_gemm_kernel)):
        for rows in ("few_rows", "some_rows", "many_rows", "small_groups"):
            for has_zeros in (False, True):
                # A bias is one load and one addition: it goes with the variant that holds more registers.
                constants = {"HAS_ZEROS": has_zeros, "HAS_BIAS": has_zeros, "ONE_GROUP": rows != "small_groups"}
                name = f"int{bits}_gemm.{rows}{'.zeros' if has_zeros else ''}"
                found.append(KernelSpec(name, kernel, types, constants, f"int{bits}_gemm.{rows}", "fp16", aligned))
    return (*found, *_checkpoint_specs(types, aligned))


def _checkpoint_specs(types: dict[str, str], aligned: tuple[str, ...]) -> Iterator[KernelSpec]:
    """AWQ's and GPTQ's checkpoints have scales in fp16, whatever the model computes in."""
    for bits, kernel, rows, dtype in (
        (4, int4_gemm_kernel, "few_rows", "bf16"),
        (4, int4_gemm_kernel, "some_rows", "bf16"),
        (4, int4_gemm_kernel, "many_rows", "bf16"),
        (4, int4_gemm_kernel, "small_groups", "bf16"),
        (4, int4_gemm_kernel, "few_rows", "fp16"),
        (4, int4_gemm_kernel, "many_rows", "fp16"),
        (8, int8_gemm_kernel, "few_rows", "bf16"),
        (8, int8_gemm_kernel, "many_rows", "fp16"),
    ):
        of_model = dict.fromkeys(("X", "BIAS", "Y"), f"*{dtype}")
        constants = {"HAS_ZEROS": True, "HAS_BIAS": True, "ONE_GROUP": rows != "small_groups"}
        name = f"int{bits}_gemm.{rows}.zeros.{dtype}_fp16scales"
        signature = types | of_model | {"SCALES": "*fp16"}
        yield KernelSpec(name, kernel, signature, constants, f"int{bits}_gemm.{rows}", "fp16", aligned)


SPECS = _specs()
