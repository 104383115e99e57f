"""Moving whole KV blocks: inside the pool, and between the pool and a contiguous staging buffer for the tiers.

A pool here is [planes, num_blocks, ...]: planes are keys and values of every layer, so one launch moves a block's
part of all of them. Staging is [n, planes, ...]: each block's parts together, in plane order, as the tiers keep them.
Bytes are moved as 64-bit words whatever the dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


def copy_blocks_ref(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool[:, targets] = pool[:, sources], both [n] int32 or int64; no block is in both, no target twice."""
    words = _words(pool)
    words[:, targets.long()] = words[:, sources.long()]


def gather_blocks_ref(pool: Tensor, blocks: Tensor, staging: Tensor) -> None:
    """staging[i] = pool[:, blocks[i]] for i below n; blocks [n], staging [at least n, planes, ...] of pool's dtype."""
    _words(staging)[: len(blocks)] = _words(pool)[:, blocks.long()].transpose(0, 1)


def scatter_blocks_ref(staging: Tensor, blocks: Tensor, pool: Tensor) -> None:
    """pool[:, blocks[i]] = staging[i] for i below n; no block twice."""
    _words(pool)[:, blocks.long()] = _words(staging)[: len(blocks)].transpose(0, 1)


def _words(blocks: Tensor) -> Tensor:
    """[a, b, ...] -> a view [a, b, words] int64. Raises ValueError for blocks of an odd size."""
    flat = blocks.view(*blocks.shape[:2], -1)  # never a copy: what is written must reach the pool
    if flat.shape[2] * flat.itemsize % 8:
        raise ValueError(f"a block's part of {flat.shape[2] * flat.itemsize} bytes is no multiple of 8")
    return flat.view(torch.int64)


@triton.jit(do_not_specialize_on_alignment=["SOURCE_BLOCKS", "TARGET_BLOCKS"])
def _block_copy_kernel(
    SOURCE,
    TARGET,
    SOURCE_BLOCKS,
    TARGET_BLOCKS,
    source_block_stride,
    source_plane_stride,
    target_block_stride,
    target_plane_stride,
    num_words,
    SOURCE_LISTED: tl.constexpr,
    TARGET_LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid [n, planes, cdiv(num_words, BLOCK)]. A side that is not listed is staging: its block i is the i-th."""
    index = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(SOURCE_BLOCKS + index).to(tl.int64) if SOURCE_LISTED else index
    target = tl.load(TARGET_BLOCKS + index).to(tl.int64) if TARGET_LISTED else index
    words = tl.load(SOURCE + source * source_block_stride + plane * source_plane_stride + at, at < num_words)
    tl.store(TARGET + target * target_block_stride + plane * target_plane_stride + at, words, at < num_words)


def _launch(source: Tensor, target: Tensor, sources: Tensor | None, targets: Tensor | None, num_blocks: int) -> None:
    """source and target [blocks, planes, words] int64, any strides over the first two."""
    if num_blocks == 0:
        return
    tile = tiles("block_copy")
    grid = (num_blocks, source.shape[1], triton.cdiv(source.shape[2], tile["BLOCK"]))
    listed: dict[str, Any] = {"SOURCE_LISTED": sources is not None, "TARGET_LISTED": targets is not None}
    _block_copy_kernel[grid](
        source,
        target,
        source if sources is None else sources,
        target if targets is None else targets,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        source.shape[2],
        **listed,
        **tile,
    )


def copy_blocks_triton(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `copy_blocks_ref`."""
    words = _words(pool).transpose(0, 1)
    _launch(words, words, sources, targets, len(sources))


def gather_blocks_triton(pool: Tensor, blocks: Tensor, staging: Tensor) -> None:
    """As `gather_blocks_ref`; staging may be pinned host memory."""
    _launch(_words(pool).transpose(0, 1), _words(staging), blocks, None, len(blocks))


def scatter_blocks_triton(staging: Tensor, blocks: Tensor, pool: Tensor) -> None:
    """As `scatter_blocks_ref`; staging may be pinned host memory."""
    _launch(_words(staging), _words(pool).transpose(0, 1), None, blocks, len(blocks))


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """As `copy_blocks_ref`, on the pool's device."""
    (copy_blocks_triton if pool.is_cuda else copy_blocks_ref)(pool, sources, targets)


def gather_blocks(pool: Tensor, blocks: Tensor, staging: Tensor) -> None:
    """As `gather_blocks_ref`, on the pool's device."""
    (gather_blocks_triton if pool.is_cuda else gather_blocks_ref)(pool, blocks, staging)


def scatter_blocks(staging: Tensor, blocks: Tensor, pool: Tensor) -> None:
    """As `scatter_blocks_ref`, on the pool's device."""
    (scatter_blocks_triton if pool.is_cuda else scatter_blocks_ref)(staging, blocks, pool)


register("block_copy", any={"BLOCK": 1024, "num_warps": 4, "num_stages": 1})

_STRIDES = ("source_block_stride", "source_plane_stride", "target_block_stride", "target_plane_stride", "num_words")
SPECS = tuple(
    KernelSpec(
        name=f"block_copy.{name}",
        kernel=_block_copy_kernel,
        signature={"SOURCE": "*i64", "TARGET": "*i64", "SOURCE_BLOCKS": "*i32", "TARGET_BLOCKS": "*i32"}
        # A pool's planes may be more than 2^31 words apart.
        | dict.fromkeys(_STRIDES, "i64"),
        constants={"SOURCE_LISTED": source_listed, "TARGET_LISTED": target_listed},
        tiles="block_copy",
        divisible_by_16=("SOURCE", "TARGET", *_STRIDES),
    )
    for name, source_listed, target_listed in (("copy", True, True), ("gather", True, False), ("scatter", False, True))
)
