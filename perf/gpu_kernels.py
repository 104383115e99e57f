"""Cases of the kernels that carry a forward pass: norms, activations, RoPE, attention, fp8 and weight-only GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perf.gpu_case import ATTENTION, BF16_TOLERANCE, FP8, Case, Check, Maker, host
from perf.gpu_timing import num_processors
from slipring.kernels import gelu_mul as gelu
from slipring.kernels import paged_decode as decode
from slipring.kernels import paged_prefill as prefill
from slipring.kernels import quantize_fp8 as fp8
from slipring.kernels import rmsnorm as norm
from slipring.kernels import rope_store_kv as rope
from slipring.kernels import silu_mul as silu
from slipring.kernels.fp8_gemm import fp8_gemm_ref, fp8_gemm_triton
from slipring.kernels.paged_kv import AttentionOptions, to_pool_ref
from slipring.kernels.rope import build_cos_sin, inverse_frequencies
from slipring.kernels.weight_only_gemm import QuantizedWeight, pack_codes, weight_only_gemm_ref, weight_only_gemm_triton

BF16 = torch.bfloat16
BLOCK_SIZE = 16
FEW = 16
"""Rows of a large result that the reference computes."""


def rmsnorm(make: Maker, tokens: int, size: int) -> Case:
    x, residual, weight = make.normal(tokens, size), make.normal(tokens, size), make.normal(size)
    arguments = (x, weight, 1e-5, residual)
    return Case(
        run=lambda: norm.rmsnorm_triton(*arguments),
        ref=lambda: norm.rmsnorm_ref(host(x), host(weight), 1e-5, host(residual)),
        tolerance=BF16_TOLERANCE,
        nbytes=4 * x.nbytes,
    )


def rmsnorm_heads(make: Maker, tokens: int, heads: int, size: int) -> Case:
    x, weight = make.normal(tokens, heads + 2, size)[:, :heads], make.normal(heads, size)
    return Case(
        run=lambda: norm.rmsnorm_triton(x, weight, 1e-6)[:1],
        ref=lambda: norm.rmsnorm_ref(host(x), host(weight), 1e-6)[:1],
        tolerance=BF16_TOLERANCE,
        nbytes=2 * x.numel() * x.itemsize,
    )


def silu_mul(make: Maker, tokens: int, size: int) -> Case:
    x = make.normal(tokens, 2 * size)
    return Case(lambda: [silu.silu_mul_triton(x)], lambda: [silu.silu_mul_ref(host(x))], BF16_TOLERANCE,
                nbytes=3 * tokens * size * x.itemsize)  # fmt: skip


def gelu_mul(make: Maker, tokens: int, size: int) -> Case:
    x = make.normal(tokens, 2 * size)
    return Case(lambda: [gelu.gelu_mul_triton(x, True)], lambda: [gelu.gelu_mul_ref(host(x), True)], BF16_TOLERANCE,
                nbytes=3 * tokens * size * x.itemsize)  # fmt: skip


def rope_store_kv(make: Maker, tokens: int, heads: int, kv_heads: int, head_dim: int, pool_dtype: torch.dtype) -> Case:
    places = max(64, tokens)
    table = make.put(build_cos_sin(*inverse_frequencies(head_dim, 1e4, None, places, places), places, BF16))
    positions = make.integers(0, places, tokens, dtype=torch.int64)
    num_blocks = -(-tokens // BLOCK_SIZE) + 2
    slots = make.shuffled(num_blocks * BLOCK_SIZE)[:tokens]
    slots[0] = -1
    slots = make.put(slots)
    qkv = make.normal(tokens, heads + 2 * kv_heads, head_dim)
    pools = make.put(torch.zeros(2, num_blocks, BLOCK_SIZE, kv_heads, head_dim, dtype=torch.uint8)).repeat_interleave(
        pool_dtype.itemsize, -1
    )
    pools = pools.view(pool_dtype)
    scales = (0.02, 0.3) if pool_dtype == FP8 else (1.0, 1.0)

    def on(run: Callable[..., None], qkv: Tensor, pools: Tensor, table: Tensor, positions: Tensor, slots: Tensor):
        query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
        run(query, key, value, table, positions, *pools, slots, *scales)
        return qkv, pools.view(torch.uint8) if pool_dtype == FP8 else pools

    inputs = (qkv, pools, table, positions, slots)
    row = head_dim * (2 * heads * 2 + 2 * kv_heads * (2 + pool_dtype.itemsize))
    return Case(
        run=lambda: on(rope.rope_store_kv_triton, *inputs),
        ref=lambda: on(rope.rope_store_kv_ref, *map(host, inputs)),
        tolerance=BF16_TOLERANCE,
        mismatches=0.002,  # bytes of fp8 codes whose value lies on a boundary
        nbytes=tokens * row,
    )


class _Context:
    """Rows of some lengths over shuffled blocks."""

    def __init__(self, make: Maker, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        owned = make.shuffled(sum(counts) + 3)
        table = torch.full((len(lengths) + 2, max(counts) + 1), 10**6, dtype=torch.int32)
        rows = torch.arange(len(lengths), dtype=torch.int32).flip(0) + 1
        for row, blocks in zip(rows.tolist(), owned.split([*counts, 3]), strict=False):
            table[row, : len(blocks)] = blocks
        self.scale = 0.25 if dtype == FP8 else 1.0
        shape = (len(owned), BLOCK_SIZE, kv_heads, head_dim)
        keys, values = (to_pool_ref(make.normal(*shape), dtype, self.scale) for _ in range(2))
        self.shared, self.rows = (keys, values, make.put(table)), make.put(rows)
        self.nbytes = 2 * sum(lengths) * kv_heads * head_dim * dtype.itemsize

    def on_host(self) -> tuple[Tensor, Tensor, Tensor]:
        keys, values, table = self.shared
        return host(keys), host(values), host(table)

    def options(self, head_dim: int, **more: Any) -> AttentionOptions:
        return AttentionOptions(scale=head_dim**-0.5, key_scale=self.scale, value_scale=self.scale, **more)


def paged_decode(
    make: Maker, lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, splits: int
) -> Case:
    context = _Context(make, lengths, kv_heads, head_dim, dtype)
    query = make.normal(len(lengths), heads + 2 * kv_heads, head_dim)[:, :heads]
    lens, few = make.listed(*lengths), min(4, len(lengths))
    options = context.options(head_dim)
    splits = splits or decode.choose_num_splits(len(lengths), kv_heads, max(lengths), num_processors())
    shared = context.shared
    return Case(
        run=lambda: [decode.paged_decode_triton(query, *shared, context.rows, lens, options, splits)],
        ref=lambda: [
            decode.paged_decode_ref(
                host(query[:few]), *context.on_host(), host(context.rows[:few]), host(lens[:few]), options
            )
        ],
        tolerance=ATTENTION,
        nbytes=context.nbytes,
        flops=4 * heads * head_dim * sum(lengths),
        pick=lambda out: [out[0][:few]],
    )


def paged_prefill(
    make: Maker, counts: list[int], starts: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Case:
    """The reference computes the last tokens of the last row, as a chunk that starts there."""
    context = _Context(make, [a + b for a, b in zip(counts, starts, strict=True)], kv_heads, head_dim, dtype)
    query = make.normal(sum(counts), heads + 2 * kv_heads, head_dim)[:, :heads]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    options, last, few = context.options(head_dim), counts[-1], min(FEW, counts[-1])
    arguments = (query, *context.shared, context.rows, make.listed(*ends), make.listed(*starts), max(counts), options)

    def ref() -> list[Tensor]:
        bounds, start = (torch.tensor(x, dtype=torch.int32) for x in ([0, few], [starts[-1] + last - few]))
        tail, row = host(query[-few:]), host(context.rows[-1:])
        return [prefill.paged_prefill_ref(tail, *context.on_host(), row, bounds, start, few, options)]

    pairs = sum(count * start + count * (count + 1) // 2 for count, start in zip(counts, starts, strict=True))
    return Case(
        run=lambda: [prefill.paged_prefill_triton(*arguments)],
        ref=ref,
        tolerance=ATTENTION,
        nbytes=context.nbytes,
        flops=4 * heads * head_dim * pairs,
        roof="bf16",
        pick=lambda out: [out[0][-few:]],
    )


def paged_tree(make: Maker, num_rows: int, nodes: int, start: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    """Drafts of a binary tree over a context, as speculative verification sees them."""
    context = _Context(make, [start + nodes] * num_rows, kv_heads, head_dim, BF16)
    paths = [0] * nodes
    for node in range(nodes):
        paths[node] = (paths[(node - 1) // 2] if node else 0) | 1 << node
    tree = make.listed(*paths, dtype=torch.int64), make.listed(*(start + p.bit_count() - 1 for p in paths)).long()
    tree = (tree[0].repeat(num_rows), tree[1].repeat(num_rows))
    query = make.normal(num_rows * nodes, heads, head_dim)
    options, few = context.options(head_dim), min(2, num_rows)
    bounds, starts = make.listed(*(nodes * i for i in range(num_rows + 1))), make.listed(*[start] * num_rows)
    arguments = (query, *context.shared, context.rows, bounds, starts, nodes, options, tree)

    def ref() -> list[Tensor]:
        masks, positions = (host(x[: few * nodes]) for x in tree)
        rows, begin = host(context.rows[:few]), host(starts[:few])
        few_query, few_bounds = host(query[: few * nodes]), host(bounds[: few + 1])
        return [
            prefill.paged_prefill_ref(
                few_query, *context.on_host(), rows, few_bounds, begin, nodes, options, (masks, positions)
            )
        ]

    return Case(lambda: [prefill.paged_prefill_triton(*arguments)], ref, ATTENTION, nbytes=context.nbytes,
                pick=lambda out: [out[0][: few * nodes]])  # fmt: skip


_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tensor": (fp8.quantize_fp8_tensor_triton, fp8.quantize_fp8_tensor_ref),
    "token": (fp8.quantize_fp8_token_triton, fp8.quantize_fp8_token_ref),
    "block": (fp8.quantize_fp8_block_triton, fp8.quantize_fp8_block_ref),
}


def quantize(make: Maker, form: str, tokens: int, size: int) -> Case:
    x = make.normal(tokens, size, scale=3.0)
    run, ref = _FORMS[form]
    # For one scale of all, everything is read twice.
    return Case(lambda: run(x), lambda: ref(host(x)), nbytes=x.numel() * (5 if form == "tensor" else 3))


def fp8_gemm(make: Maker, form: str, m: int, k: int, n: int, roof: str = "fp8") -> Case:
    x, weight = make.normal(m, k), make.normal(n, k, scale=k**-0.5)
    if form == "block":
        (a, a_scale), b = fp8.quantize_fp8_block_ref(x), (weight * 64).to(FP8)
        b_scale = (make.normal(-(-n // 128), -(-k // 128), dtype=torch.float32).abs() + 0.5) / 64
    else:
        (a, a_scale), (b, b_scale) = fp8.quantize_fp8_token_ref(x), fp8.quantize_fp8_token_ref(weight)
    few = min(FEW, m)
    return Case(
        run=lambda: [fp8_gemm_triton(a, a_scale, b, b_scale, BF16)],
        ref=lambda: [fp8_gemm_ref(host(a)[:few], host(a_scale)[:few], host(b), host(b_scale), BF16)],
        tolerance=BF16_TOLERANCE,
        nbytes=m * k + n * k + 2 * m * n,
        flops=2 * m * n * k,
        roof=roof,
        pick=lambda out: [out[0][:few]],
    )


def weight_only(make: Maker, bits: int, m: int, k: int, n: int, group: int, zeros: bool, roof: str = "bf16") -> Case:
    codes = pack_codes(make.integers(0, 2**bits, n, k, dtype=torch.uint8), bits)
    scales = ((make.normal(k // group, n).abs() + 0.5) / (2 ** (bits - 2) * k**0.5)).to(BF16)
    given = make.integers(0, 2**bits, k // group, n, dtype=torch.uint8) if zeros else None
    x, few = make.normal(m, k), min(FEW, m)

    def ref() -> list[Tensor]:
        weight = QuantizedWeight(host(codes), host(scales), None if given is None else host(given), bits, group)
        return [weight_only_gemm_ref(host(x[:few]), weight)]

    weight = QuantizedWeight(codes, scales, given, bits, group)
    return Case(
        run=lambda: [weight_only_gemm_triton(x, weight)],
        ref=ref,
        tolerance=BF16_TOLERANCE,
        nbytes=codes.nbytes + scales.nbytes + 2 * m * (n + k),
        flops=2 * m * n * k,
        roof=roof,
        pick=lambda out: [out[0][:few]],
    )


_KV = {"bf16": BF16, "fp8": FP8}
_8B = (32, 8, 128)
"""Query heads, KV heads and head size of an 8B Llama; its hidden size is 4096, its MLP's 14336."""
CHECKS = (
    Check("rmsnorm", "rmsnorm", rmsnorm, (3, 100), {"8192 x 4096": (8192, 4096)}),
    Check("rmsnorm.heads", "rmsnorm", rmsnorm_heads, (5, 3, 24), {"8192 x 40 x 128": (8192, 40, 128)}),
    Check("silu_mul", "silu_mul", silu_mul, (3, 1100), {"8192 x 14336": (8192, 14336)}),
    Check("gelu_mul", "gelu_mul", gelu_mul, (3, 1100), {"8192 x 14336": (8192, 14336)}),
    *(Check(f"rope_store_kv.{name}", "rope_store_kv", rope_store_kv, (5, 6, 2, 24, kv), {"8192": (8192, *_8B, kv)})
      for name, kv in _KV.items()),
    *(Check(f"paged_decode.{name}", "paged_decode", paged_decode, ([150, 1, 64, 9], 6, 2, 64, kv, splits),
            {"64 rows of 4096": ([4096] * 64, *_8B, kv, 0), "1 row of 32768": ([32768], *_8B, kv, 0)})
      for name, kv, splits in (("bf16", BF16, 4), ("fp8", FP8, 1))),
    *(Check(f"paged_prefill.{name}", "paged_prefill", paged_prefill, ([20, 1, 33], [0, 20, 71], 6, 2, 24, kv),
            {"8192 tokens": ([8192], [0], *_8B, kv), "2048 after 6144": ([2048], [6144], *_8B, kv)})
      for name, kv in _KV.items()),
    Check("paged_prefill.tree", "paged_prefill", paged_tree, (2, 9, 37, 4, 2, 16),
          {"64 rows, 16 drafts after 4096": (64, 16, 4096, *_8B)}),
    *(Check(f"quantize_fp8.{form}", "quantize_fp8", quantize, (form, 3, 300), {"8192 x 4096": (form, 8192, 4096)})
      for form in _FORMS),
    *(Check(f"fp8_gemm.{form}", "fp8_gemm", fp8_gemm, (form, 5, 300, 200),
            {"16 x 4096 x 14336": (form, 16, 4096, 14336, "memory"), "8192 x 4096 x 14336": (form, 8192, 4096, 14336)})
      for form in ("row", "block")),
    *(Check(f"int{bits}_gemm", "weight_only_gemm", weight_only, (bits, 5, 256, 72, 64, True),
            {"16 x 4096 x 14336": (bits, 16, 4096, 14336, 128, True, "memory"),
             "4096 x 4096 x 14336": (bits, 4096, 4096, 14336, 128, True)}) for bits in (4, 8)),
)  # fmt: skip
