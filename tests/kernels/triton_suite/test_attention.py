"""Paged decode and prefill attention against their references: irregular lengths, groups, head sizes and masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels.paged_decode import choose_num_splits, paged_decode_ref, paged_decode_triton
from slipring.kernels.paged_kv import AttentionOptions, to_pool_ref
from slipring.kernels.paged_prefill import paged_prefill_ref, paged_prefill_triton
from tests.kernels.pairwise import pairwise
from tests.kernels.tolerances import ATTENTION_TOLERANCE, DTYPES

BLOCK_SIZE = 8
FP8 = torch.float8_e4m3fn
TYPES = [(dtype, dtype) for dtype in DTYPES] + [(torch.bfloat16, FP8), (torch.float16, FP8)]


class Pool:
    """Rows of the given context lengths over shuffled blocks; what nobody owns is NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(len(lengths) + head_dim)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        owned = torch.randperm(sum(counts) + 3, generator=self.generator)
        self.block_table = torch.full((len(lengths) + 2, max(counts) + 1), 10**6, dtype=torch.int32)
        shape = (len(owned), BLOCK_SIZE, kv_heads, head_dim)
        self.pools = [torch.full(shape, float("nan")).to(dtype) for _ in range(2)]
        self.rows = torch.arange(len(lengths), dtype=torch.int32).flip(0) + 1
        for row, length, blocks in zip(self.rows.tolist(), lengths, owned.split([*counts, 3]), strict=False):
            self.block_table[row, : len(blocks)] = blocks
            for pool in self.pools:
                flat = torch.full((len(blocks) * BLOCK_SIZE, *shape[2:]), float("nan"))
                flat[:length] = self.normal(length, *shape[2:])
                stored = to_pool_ref(flat, dtype, 0.25 if dtype == FP8 else 1.0)
                pool.view(torch.uint8)[blocks] = stored.view(len(blocks), *shape[1:]).view(torch.uint8)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def options(head_dim: int, pool_dtype: torch.dtype, **more: float) -> AttentionOptions:
    scale = 0.25 if pool_dtype == FP8 else 1.0
    return AttentionOptions(scale=2 * head_dim**-0.5, key_scale=scale, value_scale=scale, **more)  # type: ignore


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    assert (ours.double() - expected.double()).abs().max() <= ATTENTION_TOLERANCE[ours.dtype]


@pytest.mark.parametrize(("types", "heads", "num_splits"), pairwise(TYPES, [(2, 3, 64), (1, 8, 24)], [1, 4]))
def test_decode(types: tuple[torch.dtype, torch.dtype], heads: tuple[int, int, int], num_splits: int) -> None:
    (dtype, pool_dtype), (kv_heads, group, head_dim), lengths = types, heads, [150, 1, 64, 9]
    pool = Pool(lengths, kv_heads, head_dim, pool_dtype)
    qkv = pool.normal(4, kv_heads * (group + 2), head_dim).to(dtype)
    query = qkv[:, : kv_heads * group]
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    arguments = (query, *pool.pools, pool.block_table, pool.rows, context_lens, options(head_dim, pool_dtype))
    assert_close(paged_decode_triton(*arguments, num_splits), paged_decode_ref(*arguments))


@pytest.mark.parametrize("more", [{"window": 20}, {"soft_cap": 1.5}, {"window": 70, "soft_cap": 1.5}])
def test_decode_with_window_and_soft_cap(more: dict[str, float]) -> None:
    lengths = [150, 7]
    pool = Pool(lengths, 2, 16, torch.float32)
    query, context_lens = pool.normal(2, 8, 16), torch.tensor(lengths, dtype=torch.int32)
    arguments = (query, *pool.pools, pool.block_table, pool.rows, context_lens, options(16, query.dtype, **more))
    expected = paged_decode_ref(*arguments)
    assert_close(paged_decode_triton(*arguments, 2), expected)
    assert not torch.allclose(expected, paged_decode_ref(*arguments[:-1], options(16, query.dtype)), atol=1e-3)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_decode_of_padding_gives_zeros(num_splits: int) -> None:
    pool = Pool([5], 1, 16, torch.float32)
    rows, context_lens = torch.tensor([1, -1], dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32)
    query = pool.normal(2, 2, 16)
    out = paged_decode_triton(
        query, *pool.pools, pool.block_table, rows, context_lens, options(16, query.dtype), num_splits
    )
    assert out[0].isfinite().all() and out[0].any() and not out[1].any()


def test_splits_fill_the_device_and_are_never_tiny() -> None:
    assert choose_num_splits(1, 8, 131072, 132) == 32
    assert choose_num_splits(1, 8, 600, 132) == 2
    assert choose_num_splits(256, 8, 131072, 132) == 1


def run_prefill(pool: Pool, counts: list[int], starts: list[int], query: Tensor, **more: object) -> None:
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    arguments = (query, *pool.pools, pool.block_table, pool.rows, cu_seqlens, torch.tensor(starts).int(), max(counts))
    assert_close(paged_prefill_triton(*arguments, **more), paged_prefill_ref(*arguments, **more))  # type: ignore


@pytest.mark.parametrize(("dtype", "pool_dtype"), TYPES)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 3, 64), (1, 4, 24)])
def test_prefill(dtype: torch.dtype, pool_dtype: torch.dtype, kv_heads: int, group: int, head_dim: int) -> None:
    counts, starts = [50, 1, 0, 33], [0, 20, 5, 71]
    pool = Pool([a + b for a, b in zip(counts, starts, strict=True)], kv_heads, head_dim, pool_dtype)
    qkv = pool.normal(sum(counts), kv_heads * (group + 2), head_dim).to(dtype)
    run_prefill(pool, counts, starts, qkv[:, : kv_heads * group], options=options(head_dim, pool_dtype))


@pytest.mark.parametrize("more", [{"window": 20}, {"window": 100}, {"soft_cap": 1.5}])
def test_prefill_with_window_and_soft_cap(more: dict[str, float]) -> None:
    counts, starts = [70, 3], [60, 40]
    pool = Pool([130, 43], 1, 16, torch.float32)
    run_prefill(pool, counts, starts, pool.normal(73, 2, 16), options=options(16, torch.float32, **more))


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "window"),
    [(torch.float32, torch.float32, 0), (torch.float32, torch.float32, 64), (torch.bfloat16, FP8, 0)],
)
@pytest.mark.parametrize("counts", [[64, 1, 5], [9, 1, 5]])
def test_prefill_of_trees(dtype: torch.dtype, pool_dtype: torch.dtype, window: int, counts: list[int]) -> None:
    starts = [70, 0, 90]
    pool = Pool([a + b for a, b in zip(counts, starts, strict=True)], 2, 16, pool_dtype)
    masks, positions = trees(counts, starts, pool.generator)
    query = pool.normal(sum(counts), 4, 16).to(dtype)
    run_prefill(pool, counts, starts, query, tree=(masks, positions), options=options(16, pool_dtype, window=window))


def trees(counts: list[int], starts: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random trees: each node's parent is any earlier node. (masks [T], positions [T])"""
    masks, positions = [], []
    for count, start in zip(counts, starts, strict=True):
        paths: list[int] = []
        for node in range(count):
            parent = paths[int(torch.randint(node, (), generator=generator))] if node else 0
            paths.append(parent | 1 << node)
        positions += [start + path.bit_count() - 1 for path in paths]
        masks += [path - (1 << 64) if path >> 63 else path for path in paths]
    return torch.tensor(masks), torch.tensor(positions)


def test_a_tree_that_does_not_fit_is_refused() -> None:
    pool = Pool([70], 1, 16, torch.float32)
    query, mask = pool.normal(65, 2, 16), torch.ones(65, dtype=torch.int64)
    with pytest.raises(ValueError, match="65"):
        run_prefill(pool, [65], [5], query, tree=(mask, mask), options=options(16, torch.float32))
