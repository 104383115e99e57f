"""StepInput entries to a `Batch`: all index tensors of a step, by vectorised numpy.

Decode entries are sorted by context, longest first, so that neighbours form groups with little padding; a group's
gathered keys and values should also stay in the cache between the gather and the attention that reads them. Only
the sampled tokens' places (`sample_at`) remember the entries' own order.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.paged_attention import AttentionPlan, Chunk, DecodeGroup, chunk_mask, length_mask
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView
from slipring.workers.attention import PlannedAttention
from slipring.workers.batch import Batch
from slipring.workers.rows import Rows

IntArray = NDArray[np.int64]

_GROUP_BYTES = 2 << 20
"""Keys (or values) of one layer that a decode group gathers at most, except for a single long row: measured, 64 rows
of 300 tokens take 220 ms a step with 2 MiB, 240 with 4 and 700 when all are gathered at once."""
_MIN_FILL = 0.7
"""Shortest row of a group, as a share of its longest: bounds the padding."""


class BatchBuilder:
    """Holds what never changes: block size, dtype, and how many blocks a decode group may gather."""

    def __init__(self, table: BatchTable, rows: Rows, block_size: int, layer_block_bytes: int, dtype: torch.dtype):
        """`layer_block_bytes`: bytes of one layer's keys in one block."""
        self._table = table
        self._rows = rows
        self._block_size = block_size
        self._group_blocks = max(1, _GROUP_BYTES // layer_block_bytes)
        self._dtype = dtype

    def build(self, step: StepInputView) -> Batch:
        """The step's forward pass. Reads row state, the table's token ids, and nothing else."""
        num_rows, num_decode = int(step.header[step.NUM_ROWS]), int(step.header[step.NUM_DECODE])
        rows = step.rows[:num_rows].astype(np.int64)
        start = step.start[:num_rows].astype(np.int64)
        num_tokens = step.num_tokens[:num_rows].astype(np.int64)
        order = np.argsort(-start[:num_decode], kind="stable")
        order = np.concatenate((order, np.arange(num_decode, num_rows)))
        ends = np.cumsum(num_tokens[order])
        token_rows, positions = _expand(rows[order], start[order], num_tokens[order], ends)
        input_ids = self._input_ids(token_rows, positions, num_decode)
        block = self._rows.block_table[token_rows, positions // self._block_size].astype(np.int64)
        plan = AttentionPlan(
            slot_mapping=torch.from_numpy(block * self._block_size + positions % self._block_size),
            groups=self._groups(token_rows[:num_decode], positions[:num_decode] + 1),
            chunks=[self._chunk(rows[i], start[i], num_tokens[i], ends[i]) for i in range(num_decode, num_rows)],
        )
        last_at = np.empty(num_rows, np.int64)
        last_at[order] = ends - 1
        sampled = (step.flags[:num_rows] & StepFlag.SAMPLE) != 0
        tensors = map(torch.from_numpy, (input_ids, positions, last_at[sampled]))
        ids, at, sample_at = tensors
        return Batch(ids, at, PlannedAttention(plan, at), sample_at)

    def entered_blocks(self, step: StepInputView) -> Tensor:
        """[n] int64: blocks that the step's entries enter and leave partly filled (`KvCache.clear`)."""
        num_rows = int(step.header[step.NUM_ROWS])
        start = step.start[:num_rows]
        end = start + step.num_tokens[:num_rows]
        last = (end - 1) // self._block_size
        entered = (start <= last * self._block_size) & (end % self._block_size != 0)
        blocks = self._rows.block_table[step.rows[:num_rows][entered], last[entered]]
        return torch.from_numpy(blocks.astype(np.int64))

    def _input_ids(self, token_rows: IntArray, positions: IntArray, num_decode: int) -> IntArray:
        ids = np.empty(len(token_rows), np.int64)
        ids[:num_decode] = self._rows.last_token[token_rows[:num_decode]]
        ids[num_decode:] = self._table.token_ids[token_rows[num_decode:], positions[num_decode:]]
        return ids

    def _groups(self, rows: IntArray, lengths: IntArray) -> list[DecodeGroup]:
        """Cut the sorted decode rows; `lengths` fall."""
        num_blocks = -(-lengths // self._block_size)
        groups, begin = [], 0
        while begin < len(rows):
            longest = int(num_blocks[begin])
            filled = int(np.searchsorted(-num_blocks, -_MIN_FILL * longest, side="right"))
            end = max(begin + 1, min(begin + self._group_blocks // longest, filled))
            groups.append(self._group(begin, end, rows[begin:end], num_blocks[begin:end], lengths[begin:end]))
            begin = end
        return groups

    def _group(self, begin: int, end: int, rows: IntArray, num_blocks: IntArray, lengths: IntArray) -> DecodeGroup:
        longest = int(num_blocks[0])
        blocks = self._rows.block_table[rows, :longest].astype(np.int64)
        outside = np.arange(longest) >= num_blocks[:, None]
        np.copyto(blocks, blocks[:, :1], where=outside)
        mask = length_mask(torch.from_numpy(lengths), longest * self._block_size, self._dtype)
        return DecodeGroup(begin, end, torch.from_numpy(blocks.reshape(-1)), mask)

    def _chunk(self, row: int, start: int, num_tokens: int, end: int) -> Chunk:
        begin, length = int(end - num_tokens), int(start + num_tokens)
        if start == 0:
            return Chunk(begin, int(end), length, None, None)
        num_blocks = -(-length // self._block_size)
        blocks = self._rows.block_table[row, :num_blocks].astype(np.int64)
        mask = chunk_mask(int(start), int(num_tokens), self._dtype)
        return Chunk(begin, int(end), length, torch.from_numpy(blocks), mask)


def _expand(rows: IntArray, start: IntArray, num_tokens: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Entries to tokens: (row of each token, its position)."""
    total = int(ends[-1]) if len(ends) else 0
    positions = np.arange(total) - np.repeat(ends - num_tokens - start, num_tokens)
    return np.repeat(rows, num_tokens), positions
