"""Row state that lives on the device: block tables, last tokens and lengths of every batch-table row.

The steps' deltas go in (`append_blocks`, `assign`), a decode step's inputs come out (`decode_inputs`), and what was
drawn goes back (`commit_tokens`), with no trip to the host in between, so a captured graph holds all of it. Columns
are [num_rows]; `rows` lists name rows of one call at most once, and a negative row is padding and has no effect.

    block_table   [num_rows, max_blocks] int32
    last_token    [num_rows] int64: drawn last, and not yet computed
    num_computed  [num_rows] int32: positions whose keys and values are in the pool, or will be when this step is done
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode step's forward pass is told, [B] each. Of padding: 0, 0, -1 (stored nowhere), 0."""

    input_ids: Tensor
    """int64"""
    positions: Tensor
    """int64"""
    slot_mapping: Tensor
    """int64"""
    context_lens: Tensor
    """int32, the new token included."""

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> DecodeInputs:
        """Buffers for `decode_inputs` to fill; a captured graph keeps one set."""
        wide = torch.empty((3, batch), dtype=torch.int64, device=device)
        return cls(wide[0], wide[1], wide[2], torch.empty(batch, dtype=torch.int32, device=device))


def append_blocks_ref(block_table: Tensor, rows: Tensor, index: Tensor, blocks: Tensor) -> None:
    """block_table[rows, index] = blocks, all [n] int32."""
    real = rows >= 0
    block_table[rows[real].long(), index[real].long()] = blocks[real]


def assign_ref(column: Tensor, rows: Tensor, values: Tensor) -> None:
    """column[rows] = values; rows [n] int32, values [n] of column's dtype."""
    real = rows >= 0
    column[rows[real].long()] = values[real]


def decode_inputs_ref(
    rows: Tensor, last_token: Tensor, num_computed: Tensor, block_table: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """One new token for each of rows [B] int32: its id, position, slot and context length, into `out`."""
    real = rows >= 0
    row = rows.clamp(min=0).long()
    position = num_computed[row].long()
    block = block_table[row, position // block_size].long()
    out.input_ids.copy_(last_token[row] * real)
    out.positions.copy_(position * real)
    out.slot_mapping.copy_(torch.where(real, block * block_size + position % block_size, -1))
    out.context_lens.copy_((position + 1) * real)


def commit_tokens_ref(rows: Tensor, tokens: Tensor, num_new: Tensor, last_token: Tensor, num_computed: Tensor) -> None:
    """After a step's draw: last_token[rows] = tokens and num_computed[rows] += num_new.

    rows [n] int32, tokens [n] int64 (negative: none was drawn, as after a chunk that is not the prompt's last),
    num_new [n] int32.
    """
    drew = (rows >= 0) & (tokens >= 0)
    last_token[rows[drew].long()] = tokens[drew]
    real = rows >= 0
    num_computed[rows[real].long()] += num_new[real]


# No kernel here is compiled anew for a count, or for the place in a larger buffer where a list begins: that would
# happen in the middle of serving.
@triton.jit(do_not_specialize=["num_appends"], do_not_specialize_on_alignment=["ROWS", "INDEX", "BLOCKS"])
def _append_blocks_kernel(BLOCK_TABLE, ROWS, INDEX, BLOCKS, stride_table, num_appends, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ROWS + at, at < num_appends, -1).to(tl.int64)
    index = tl.load(INDEX + at, at < num_appends, 0)
    block = tl.load(BLOCKS + at, at < num_appends, 0)
    tl.store(BLOCK_TABLE + row * stride_table + index, block, row >= 0)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ROWS", "VALUES"])
def _assign_kernel(COLUMN, ROWS, VALUES, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ROWS + at, at < num_rows, -1)
    tl.store(COLUMN + row, tl.load(VALUES + at, at < num_rows, 0), row >= 0)


@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=["ROWS", "INPUT_IDS", "POSITIONS", "SLOTS", "CONTEXT_LENS"],
)
def _decode_inputs_kernel(
    ROWS,
    LAST_TOKEN,
    NUM_COMPUTED,
    BLOCK_TABLE,
    INPUT_IDS,
    POSITIONS,
    SLOTS,
    CONTEXT_LENS,
    stride_table,
    batch,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < batch
    row = tl.load(ROWS + at, inside, -1).to(tl.int64)
    real = row >= 0
    position = tl.load(NUM_COMPUTED + row, real, 0)
    block = tl.load(BLOCK_TABLE + row * stride_table + position // BLOCK_SIZE, real, 0).to(tl.int64)
    tl.store(INPUT_IDS + at, tl.load(LAST_TOKEN + row, real, 0), inside)
    tl.store(POSITIONS + at, position.to(tl.int64), inside)
    tl.store(SLOTS + at, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), inside)
    tl.store(CONTEXT_LENS + at, tl.where(real, position + 1, 0), inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["ROWS", "TOKENS", "NUM_NEW"])
def _commit_tokens_kernel(ROWS, TOKENS, NUM_NEW, LAST_TOKEN, NUM_COMPUTED, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ROWS + at, at < num_rows, -1)
    token = tl.load(TOKENS + at, at < num_rows, -1)
    num_new = tl.load(NUM_NEW + at, at < num_rows, 0)
    tl.store(LAST_TOKEN + row, token, (row >= 0) & (token >= 0))
    tl.store(NUM_COMPUTED + row, tl.load(NUM_COMPUTED + row, row >= 0, 0) + num_new, row >= 0)


def _grid(count: int) -> tuple[int]:
    return (int(triton.cdiv(count, tiles("row_state")["BLOCK"])),)


def append_blocks_triton(block_table: Tensor, rows: Tensor, index: Tensor, blocks: Tensor) -> None:
    """As `append_blocks_ref`."""
    if count := len(rows):
        stride = block_table.stride(0)
        _append_blocks_kernel[_grid(count)](block_table, rows, index, blocks, stride, count, **tiles("row_state"))


def assign_triton(column: Tensor, rows: Tensor, values: Tensor) -> None:
    """As `assign_ref`."""
    if count := len(rows):
        _assign_kernel[_grid(count)](column, rows, values, count, **tiles("row_state"))


def decode_inputs_triton(
    rows: Tensor, last_token: Tensor, num_computed: Tensor, block_table: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """As `decode_inputs_ref`."""
    if batch := len(rows):
        tile: dict[str, Any] = {"BLOCK_SIZE": block_size} | tiles("row_state")
        _decode_inputs_kernel[_grid(batch)](
            rows,
            last_token,
            num_computed,
            block_table,
            out.input_ids,
            out.positions,
            out.slot_mapping,
            out.context_lens,
            block_table.stride(0),
            batch,
            **tile,
        )


def commit_tokens_triton(
    rows: Tensor, tokens: Tensor, num_new: Tensor, last_token: Tensor, num_computed: Tensor
) -> None:
    """As `commit_tokens_ref`."""
    if count := len(rows):
        tile = tiles("row_state")
        _commit_tokens_kernel[_grid(count)](rows, tokens, num_new, last_token, num_computed, count, **tile)


def append_blocks(block_table: Tensor, rows: Tensor, index: Tensor, blocks: Tensor) -> None:
    """As `append_blocks_ref`, on the table's device."""
    (append_blocks_triton if block_table.is_cuda else append_blocks_ref)(block_table, rows, index, blocks)


def assign(column: Tensor, rows: Tensor, values: Tensor) -> None:
    """As `assign_ref`, on the column's device."""
    (assign_triton if column.is_cuda else assign_ref)(column, rows, values)


def decode_inputs(
    rows: Tensor, last_token: Tensor, num_computed: Tensor, block_table: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """As `decode_inputs_ref`, on the rows' device."""
    run = decode_inputs_triton if rows.is_cuda else decode_inputs_ref
    run(rows, last_token, num_computed, block_table, block_size, out)


def commit_tokens(rows: Tensor, tokens: Tensor, num_new: Tensor, last_token: Tensor, num_computed: Tensor) -> None:
    """As `commit_tokens_ref`, on the rows' device."""
    run = commit_tokens_triton if rows.is_cuda else commit_tokens_ref
    run(rows, tokens, num_new, last_token, num_computed)


register("row_state", any={"BLOCK": 256, "num_warps": 4, "num_stages": 1})


_I32, _I64 = "*i32", "*i64"
_COLUMNS = ("BLOCK_TABLE", "COLUMN", "LAST_TOKEN", "NUM_COMPUTED")


def _spec(kernel: object, name: str, pointers: Mapping[str, str], scalars: str, **constants: int) -> KernelSpec:
    return KernelSpec(
        name=f"row_state.{name}",
        kernel=kernel,
        signature={**pointers} | dict.fromkeys(scalars.split(), "i32"),
        constants=constants,
        tiles="row_state",
        divisible_by_16=tuple(name for name in pointers if name in _COLUMNS),
    )


SPECS = (
    _spec(
        _append_blocks_kernel,
        "append_blocks",
        {"BLOCK_TABLE": _I32, "ROWS": _I32, "INDEX": _I32, "BLOCKS": _I32},
        "stride_table num_appends",
    ),
    _spec(_assign_kernel, "assign.i32", {"COLUMN": _I32, "ROWS": _I32, "VALUES": _I32}, "num_rows"),
    _spec(_assign_kernel, "assign.i64", {"COLUMN": _I64, "ROWS": _I32, "VALUES": _I64}, "num_rows"),
    _spec(
        _decode_inputs_kernel,
        "decode_inputs",
        {"LAST_TOKEN": _I64, "INPUT_IDS": _I64, "POSITIONS": _I64, "SLOTS": _I64}
        | {"ROWS": _I32, "NUM_COMPUTED": _I32, "BLOCK_TABLE": _I32, "CONTEXT_LENS": _I32},
        "stride_table batch",
        BLOCK_SIZE=16,
    ),
    _spec(
        _commit_tokens_kernel,
        "commit_tokens",
        {"ROWS": _I32, "TOKENS": _I64, "NUM_NEW": _I32, "LAST_TOKEN": _I64, "NUM_COMPUTED": _I32},
        "num_rows",
    ),
)
