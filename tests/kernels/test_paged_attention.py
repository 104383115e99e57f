"""Paged attention of a mixed batch against dense attention, one sequence at a time in double precision."""

from __future__ import annotations

import pytest
import torch

from slipring.kernels.paged_attention import (
    AttentionPlan,
    Chunk,
    DecodeGroup,
    chunk_mask,
    decode_mask,
    paged_attention,
)
from tests.kernels.tolerances import DTYPES, TOLERANCE

BLOCK = 8
DECODE = [41, 40, 33, 9, 8, 1]
"""Context lengths of the decode rows, longest first."""
DRAFTED, WIDTH = [21, 17, 3], 3
CHUNKS = [(0, 1), (0, 13), (5, 6), (16, 8), (37, 20)]
"""(start, tokens) of the chunks."""


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """q [n, H, D] at positions start.., k and v [L, KVH, D] -> [n, H * D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * q.shape[-1] ** -0.5
    later = torch.arange(k.shape[0]) > start + torch.arange(q.shape[0])[:, None]
    probs = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", probs, v).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 40])
def test_a_mixed_batch(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    num_heads, num_kv_heads = heads
    sequences = [(length - 1, 1) for length in DECODE] + [(length - WIDTH, WIDTH) for length in DRAFTED] + CHUNKS
    free = torch.randperm(64, generator=generator).tolist()
    pool = torch.zeros(2, 64, BLOCK, num_kv_heads, head_dim, dtype=dtype)
    queries, keys, values, tables, expected = [], [], [], [], []
    for start, count in sequences:
        q = torch.randn(count, num_heads, head_dim, generator=generator).to(dtype)
        kv = torch.randn(2, start + count, num_kv_heads, head_dim, generator=generator).to(dtype)
        table = [free.pop() for _ in range(-(-(start + count) // BLOCK))]
        for position in range(start + count):
            pool[:, table[position // BLOCK], position % BLOCK] = kv[:, position]
        queries.append(q)
        keys.append(kv[0, start:])
        values.append(kv[1, start:])
        tables.append(table)
        expected.append(dense(q, kv[0], kv[1], start))
    step = plan(tables, num_heads // num_kv_heads, dtype)
    out = paged_attention(
        torch.cat(queries), torch.cat(keys), torch.cat(values), pool[0], pool[1], step, head_dim**-0.5
    )
    assert (out.double() - torch.cat(expected)).abs().max() <= TOLERANCE[dtype]


def plan(tables: list[list[int]], group_heads: int, dtype: torch.dtype) -> AttentionPlan:
    groups = [group(begin, DECODE[begin:end], 1, tables[begin:end], dtype) for begin, end in ((0, 3), (3, 5), (5, 6))]
    drafted = tables[len(DECODE) : len(DECODE) + len(DRAFTED)]
    groups.append(group(len(DECODE), DRAFTED, WIDTH, drafted, dtype, group_heads))
    chunks, begin = [], len(DECODE) + len(DRAFTED) * WIDTH
    for (start, count), table in zip(CHUNKS, tables[len(DECODE) + len(DRAFTED) :], strict=True):
        blocks = None if start == 0 else torch.tensor(table)
        mask = None if start == 0 else chunk_mask(start, count, dtype)
        chunks.append(Chunk(begin, begin + count, start + count, blocks, mask))
        begin += count
    return AttentionPlan(torch.empty(0, dtype=torch.int64), groups, chunks)


def group(
    begin: int, lengths: list[int], width: int, tables: list[list[int]], dtype: torch.dtype, group_heads: int = 1
) -> DecodeGroup:
    longest = len(tables[0])
    padded = [table + [table[0]] * (longest - len(table)) for table in tables]
    seen = torch.tensor(lengths)[:, None] - torch.arange(width).flip(0)
    mask = decode_mask(seen, longest * BLOCK, group_heads, dtype)
    return DecodeGroup(begin, begin + width * len(lengths), width, torch.tensor(padded).flatten(), mask)


def test_masks_have_the_shape_of_the_truth() -> None:
    assert chunk_mask(2, 3, torch.float32).isinf().tolist() == [
        [False, False, False, True, True],
        [False, False, False, False, True],
        [False, False, False, False, False],
    ]
    assert decode_mask(torch.tensor([[8], [8]]), 8, 3, torch.float32) is None
    mask = decode_mask(torch.tensor([[3], [1]]), 4, 3, torch.float32)
    assert mask is not None and mask.isinf().sum(-1).flatten().tolist() == [1, 3]
