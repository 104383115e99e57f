"""The paged KV pool: one key and one value tensor per layer, [num_blocks, block_size, KVH, D].

A block is contiguous, so gathering a row's context is one large copy per block. On the CPU the pool is one mapping,
zeroed by the kernel page by page as blocks are first written (an unused block costs no memory), and asks for huge
pages; on a GPU it is one tensor.

Invariant: every position of a block that its owner has not written yet is finite. Blocks change owners without
being cleaned, and a failed row may leave NaN behind, so `clear` runs when a step enters a block that it leaves
partly filled (`runner.py`). Paged kernels load no position outside of a row, and need neither.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.shm.memory import available_bytes
from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.workers.link import StartRefused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_CPU = torch.device("cpu")


class MemoryShortageError(StartRefused):
    """What was asked for does not fit; the message names the flag to change."""


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one block over all layers."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes that drafts take (`speculation/memory.py`)."""

    for_each_block: int = 0
    """Keys and values of a draft model or head, for each block of the pool."""
    fixed: int = 0
    """Weights, and states of the batch's rows."""


def size_pool(config: WorkerConfig, available: int, drafts: DraftMemory = DraftMemory()) -> int:
    """Number of blocks: as told, or as many as the byte budget holds, drafts' keys and values included. Raises
    MemoryShortageError."""
    each = block_bytes(config.model, config.block_size, DTYPES[config.dtype]) + drafts.for_each_block
    num_blocks = config.num_blocks if config.num_blocks is not None else config.kv_cache_bytes // each
    if num_blocks < 1:
        raise MemoryShortageError(
            f"--kv-cache-memory-bytes {config.kv_cache_bytes} does not hold a single block of {each} bytes"
        )
    if num_blocks * each + drafts.fixed > available:
        needs = f"the KV cache needs {num_blocks * each / 2**30:.2f} GiB"
        if drafts.fixed:
            needs += f" and what makes drafts {drafts.fixed / 2**30:.2f} GiB more"
        raise MemoryShortageError(
            f"{needs} but only {available / 2**30:.2f} GiB of memory is available; lower --kv-cache-memory-bytes (or "
            "--num-gpu-blocks-override), or give the container more memory"
        )
    return num_blocks


class KvCache:
    """Pool tensors of all layers. `pools[layer]` is (keys, values)."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes(spec, block_size, dtype)
        self.budget_bytes = self.block_bytes
        """What a block takes of the KV cache's budget: its own bytes, and drafts' keys and values."""
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self._all = _zeroed(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self.pools: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self._all]

    @classmethod
    def for_worker(cls, config: WorkerConfig, drafts: DraftMemory = DraftMemory()) -> KvCache:
        """Raises MemoryShortageError when pool and drafts do not fit into what the container still allows."""
        num_blocks = size_pool(config, available_bytes(), drafts)
        made = cls(config.model, num_blocks, config.block_size, DTYPES[config.dtype])
        made.budget_bytes += drafts.for_each_block
        return made

    def as_bytes(self) -> NDArray[np.uint8]:
        """[planes, num_blocks, bytes of a block's part]: the same memory; only for a pool on the CPU."""
        planes = self._all.view(torch.uint8).view(2 * self._all.shape[0], self.num_blocks, -1)
        return planes.numpy()

    def clear(self, blocks: Tensor) -> None:
        """Zero these blocks ([n] int64) in every layer."""
        self._all.index_fill_(2, blocks, 0)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the positions in slots `source` to slots `target`, [n] int64 both, in every layer; they may overlap."""
        slots = self._all.flatten(2, 3)
        slots.index_copy_(2, target, slots.index_select(2, source))


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A lazily zeroed tensor on its own anonymous mapping, which lives as long as the tensor."""
    mapping = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype, count=prod(shape)).view(shape)
