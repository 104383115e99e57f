"""Canonical pages: written at one parallel shape, read at any other, bytes equal, each byte written once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipring.shm.pages import CanonicalPageMapping, PageShape

WAYS = [1, 2, 4, 8]
SHAPES = st.builds(
    PageShape,
    num_planes=st.integers(1, 6).map(lambda layers: 2 * layers),
    block_size=st.sampled_from([1, 4, 16]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
    head_bytes=st.sampled_from([2, 6, 128]),
)


def _local_pages(shape: PageShape, page: np.ndarray, ways: int) -> list[np.ndarray]:
    """What each rank would hold of `page`, by plain slicing."""
    whole = page.reshape(shape.num_planes, shape.block_size, shape.num_kv_heads, shape.head_bytes)
    parts = []
    for rank in range(ways):
        if ways <= shape.num_kv_heads:
            each = shape.num_kv_heads // ways
            heads = slice(rank * each, (rank + 1) * each)
        else:
            head = rank * shape.num_kv_heads // ways
            heads = slice(head, head + 1)
        parts.append(np.ascontiguousarray(whole[:, :, heads]).reshape(-1))
    return parts


@given(SHAPES, st.sampled_from(WAYS), st.sampled_from(WAYS), st.integers(0, 63), st.integers(0, 1 << 32))
def test_written_at_one_shape_read_at_another(shape: PageShape, write: int, read: int, block: int, seed: int) -> None:
    page = np.random.default_rng(seed).integers(0, 256, shape.nbytes, np.uint8)
    stored = np.zeros_like(page)
    times_written = np.zeros(shape.nbytes, np.int64)
    for rank, local in enumerate(_local_pages(shape, page, write)):
        mapping = CanonicalPageMapping.of(shape, write, rank)
        assert mapping.local_bytes == local.nbytes
        if mapping.writes(block):
            mapping.store(local, stored)
            marks = np.zeros(shape.nbytes, np.uint8)
            mapping.store(np.ones_like(local), marks)
            times_written += marks
    assert (times_written == 1).all()
    assert np.array_equal(stored, page)
    for rank, local in enumerate(_local_pages(shape, page, read)):
        mapping = CanonicalPageMapping.of(shape, read, rank)
        got = np.zeros_like(local)
        mapping.load(stored, got)
        assert np.array_equal(got, local)


@given(SHAPES, st.sampled_from(WAYS))
def test_replicas_take_turns(shape: PageShape, ways: int) -> None:
    mappings = [CanonicalPageMapping.of(shape, ways, rank) for rank in range(ways)]
    writers = mappings[0].num_writers
    for block in range(2 * writers):
        assert sum(mapping.writes(block) for mapping in mappings) == ways // writers


@pytest.mark.parametrize(("heads", "ways", "rank"), [(3, 2, 0), (2, 3, 0), (2, 2, 2), (2, 2, -1), (2, 0, 0)])
def test_shapes_that_do_not_divide_are_refused(heads: int, ways: int, rank: int) -> None:
    with pytest.raises(ValueError, match="KV heads"):
        CanonicalPageMapping.of(PageShape(4, 16, heads, 128), ways, rank)


def test_a_page_of_another_size_is_refused() -> None:
    mapping = CanonicalPageMapping.of(PageShape(2, 4, 2, 8), 2, 0)
    with pytest.raises(AssertionError, match="size"):
        mapping.store(np.zeros(mapping.local_bytes - 1, np.uint8), np.zeros(mapping.canonical_bytes, np.uint8))
