"""`CanonicalPageMapping`: how one rank's part of a block's KV lies in a page that knows no parallelism.

A canonical page holds one block of the whole model, [planes, block_size, num_kv_heads, head_dim], where planes are
keys and values of every layer in order. A rank that holds only some heads has the same block as a local page with
fewer heads. The mapping is a list of strided copy runs between the two, so that what was stored by four ranks can be
loaded by two, or by eight. What lies where in a page may change only with `runtime.tiers.store.PAGE_FORMAT`.

Where there are more ranks than KV heads, several ranks hold the same bytes. They take turns: a rank writes block `b`
only if `b % num_writers == writer_index`, so every byte is written once, and the work is spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from slipring.shm.spec import ModelSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of one element of the KV cache, by its dtype."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageShape:
    """One block of the whole model."""

    num_planes: int
    """2 * num_layers."""
    block_size: int
    num_kv_heads: int
    head_bytes: int
    """head_dim * bytes of an element."""

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int, dtype: str) -> PageShape:
        head_bytes = spec.head_dim * ELEMENT_BYTES[dtype]
        return cls(2 * spec.num_layers, block_size, spec.num_kv_heads, head_bytes)

    @property
    def nbytes(self) -> int:
        return self.num_planes * self.block_size * self.num_kv_heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`count` fragments of `size` bytes, at even distances on both sides. All in bytes."""

    local_offset: int
    local_stride: int
    canonical_offset: int
    canonical_stride: int
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class CanonicalPageMapping:
    runs: tuple[CopyRun, ...]
    local_bytes: int
    canonical_bytes: int
    num_writers: int
    """Ranks that hold the very same bytes."""
    writer_index: int

    @classmethod
    def of(cls, shape: PageShape, ways: int, rank: int) -> CanonicalPageMapping:
        """Rank `rank` of `ways` tensor-parallel ranks. Raises ValueError where heads and ranks do not divide."""
        heads = shape.num_kv_heads
        if ways < 1 or not 0 <= rank < ways or (heads % ways and ways % heads):
            raise ValueError(f"{heads} KV heads cannot be spread over {ways} ranks (rank {rank})")
        num_writers = max(1, ways // heads)
        local_heads = max(1, heads // ways)
        first_head = rank // num_writers * local_heads
        fragment = local_heads * shape.head_bytes
        count = shape.num_planes * shape.block_size
        run = CopyRun(0, fragment, first_head * shape.head_bytes, heads * shape.head_bytes, fragment, count)
        if local_heads == heads:
            run = CopyRun(0, shape.nbytes, 0, shape.nbytes, shape.nbytes, 1)
        return cls((run,), fragment * count, shape.nbytes, num_writers, rank % num_writers)

    @property
    def is_identity(self) -> bool:
        """A local page is the canonical page, byte for byte."""
        return self.runs[0].count == 1 and self.local_bytes == self.canonical_bytes

    def writes(self, block: int) -> bool:
        """Whether it is this rank's turn to store the sequence's `block`-th block."""
        return block % self.num_writers == self.writer_index

    def store(self, local: Bytes, canonical: Bytes) -> None:
        """local [local_bytes] into its places of canonical [canonical_bytes]."""
        for run in self.runs:
            _fragments(canonical, run.canonical_offset, run.canonical_stride, run)[:] = _fragments(
                local, run.local_offset, run.local_stride, run
            )

    def load(self, canonical: Bytes, local: Bytes) -> None:
        """This rank's part of canonical [canonical_bytes] into local [local_bytes]."""
        for run in self.runs:
            _fragments(local, run.local_offset, run.local_stride, run)[:] = _fragments(
                canonical, run.canonical_offset, run.canonical_stride, run
            )


def _fragments(page: Bytes, offset: int, stride: int, run: CopyRun) -> Bytes:
    """[count, size] view."""
    end = offset + stride * (run.count - 1) + run.size
    assert page.ndim == 1 and page.flags.c_contiguous and end <= page.nbytes, "a page of another size"
    return as_strided(page[offset:], (run.count, run.size), (stride, 1))
