"""Entries to a `Batch`: all index tensors of a step, by vectorised numpy.

Decode entries are sorted by their number of tokens (one, and drafts) and by context, longest first, so that neighbours
form groups with little padding; a group's gathered keys and values should also stay in the cache between the gather
and the attention that reads them. Only the sampled tokens' places (`sample_at`) remember the entries' own order.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.paged_attention import AttentionPlan, Chunk, DecodeGroup, chunk_mask, decode_mask, tree_mask
from slipring.shm.table import BatchTable
from slipring.workers.attention import PlannedAttention
from slipring.workers.batch import Batch
from slipring.workers.entries import Entries
from slipring.workers.kv_cache import KvCache
from slipring.workers.rows import Rows

IntArray = NDArray[np.int64]

_GROUP_BYTES = 2 << 20
"""Keys (or values) of one layer that a decode group gathers at most, except for a single long row: measured, 64 rows
of 300 tokens take 220 ms a step with 2 MiB, 240 with 4 and 700 when all are gathered at once."""
_MIN_FILL = 0.7
"""Shortest row of a group, as a share of its longest: bounds the padding."""


class BatchBuilder:
    """Holds what never changes: block size, dtype, and how many blocks a decode group may gather."""

    def __init__(
        self,
        table: BatchTable,
        rows: Rows,
        block_size: int,
        layer_block_bytes: int,
        group_heads: int,
        dtype: torch.dtype,
    ) -> None:
        """`layer_block_bytes`: bytes of one layer's keys in one block; `group_heads`: query heads of one KV head."""
        self._table = table
        self._rows = rows
        self._block_size = block_size
        self._group_heads = group_heads
        self._group_blocks = max(1, _GROUP_BYTES // layer_block_bytes)
        self._dtype = dtype

    def of_rows(self, rows: Rows) -> BatchBuilder:
        """Another one, for other rows of the same table."""
        other = copy.copy(self)
        other._rows = rows
        return other

    def build(self, entries: Entries) -> Batch:
        """The step's forward pass. Reads row state, the table's token ids, and nothing else."""
        rows, start, num_tokens, num_decode = entries.rows, entries.start, entries.num_tokens, entries.num_decode
        order = np.lexsort((-start[:num_decode], -num_tokens[:num_decode]))
        order = np.concatenate((order, np.arange(num_decode, len(rows))))
        ends = np.cumsum(num_tokens[order])
        token_rows, positions = _expand(rows[order], start[order], num_tokens[order], ends)
        input_ids = self._input_ids(entries, order, token_rows, positions)
        plan = AttentionPlan(
            slot_mapping=torch.from_numpy(self.slots(token_rows, positions)),
            groups=self._groups(entries, order[:num_decode]),
            chunks=[self._chunk(rows[i], start[i], num_tokens[i], ends[i]) for i in range(num_decode, len(rows))],
        )
        end_at = np.empty(len(rows), np.int64)
        end_at[order] = ends
        draws_end = np.cumsum(entries.num_draws)
        _, sample_at = _expand(rows, end_at - entries.num_draws, entries.num_draws, draws_end)
        self._hang(positions, entries, order[:num_decode])
        if entries.absent is not None:
            positions += np.repeat(entries.absent[order], num_tokens[order])
        ids, at, sampled = map(torch.from_numpy, (input_ids, positions, sample_at))
        return Batch(ids, at, PlannedAttention(plan, at), sampled, end_at - num_tokens)

    def build_in(self, entries: Entries, kv: KvCache) -> Batch:
        """As `build`; whatever the blocks of `kv` held that these entries enter is gone."""
        if len(entered := self._entered_blocks(entries)):
            kv.clear(entered)
        return self.build(entries)

    def _entered_blocks(self, entries: Entries) -> Tensor:
        """[n] int64: blocks that the step's entries enter and leave partly filled (`KvCache.clear`)."""
        start, end = entries.start, entries.end
        last = (end - 1) // self._block_size
        entered = (start <= last * self._block_size) & (end % self._block_size != 0) & (end > start)
        blocks = self._rows.block_table[entries.rows[entered], last[entered]]
        return torch.from_numpy(blocks.astype(np.int64))

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Where the pool holds these positions of rows, [n] each."""
        block = self._rows.block_table[rows, positions // self._block_size].astype(np.int64)
        return block * self._block_size + positions % self._block_size

    @staticmethod
    def _hang(positions: IntArray, entries: Entries, order: IntArray) -> None:
        """In place: the decode tokens' positions in the cache become those in their sequences."""
        if (branches := entries.branches) is None:
            return
        num_tokens = entries.num_tokens[order]
        turned = branches.root[order, None] + branches.depth[order]
        turned = turned[np.arange(turned.shape[1]) < num_tokens[:, None]]
        positions[: len(turned)] = turned

    def _input_ids(self, entries: Entries, order: IntArray, token_rows: IntArray, positions: IntArray) -> IntArray:
        """A prompt's tokens stand in the table; a decode row's are its last one and its drafts."""
        num_decode, drafts = entries.num_decode, entries.drafts
        first = int(entries.num_tokens[:num_decode].sum())
        ids = np.empty(len(token_rows), np.int64)
        ids[first:] = self._table.token_ids[token_rows[first:], positions[first:]]
        last = self._rows.last_token[entries.rows[:num_decode]]
        own = np.concatenate((last[:, None], drafts.tokens), 1)[order[:num_decode]]
        ids[:first] = own[np.arange(own.shape[1]) < entries.num_tokens[order[:num_decode], None]]
        return ids

    def _groups(self, entries: Entries, order: IntArray) -> list[DecodeGroup]:
        """Cut the sorted decode entries: each group has one number of tokens, and contexts that fall."""
        rows, widths = entries.rows[order], entries.num_tokens[order]
        num_blocks = -(-entries.end[order] // self._block_size)
        groups, token = [], 0
        for width in np.unique(widths[widths > 0])[::-1].tolist():
            begin, stop = (int(np.searchsorted(-widths, -width, side=side)) for side in ("left", "right"))
            while begin < stop:
                longest = int(num_blocks[begin])
                filled = begin + int(np.searchsorted(-num_blocks[begin:stop], -_MIN_FILL * longest, side="right"))
                end = max(begin + 1, min(begin + self._group_blocks // longest, filled))
                at = slice(begin, end)
                blocks = self._blocks_of(rows[at], num_blocks[at])
                mask = self._group_mask(entries, order[at], width, longest * self._block_size)
                stop_token = token + width * (end - begin)
                groups.append(DecodeGroup(token, stop_token, width, blocks, mask))
                token, begin = stop_token, end
        return groups

    def _group_mask(self, entries: Entries, at: IntArray, width: int, padded: int) -> Tensor | None:
        """For the entries `at`, `width` tokens each, whose context is read as `padded` positions."""
        if (branches := entries.branches) is not None:
            root, sees = torch.from_numpy(branches.root[at]), torch.from_numpy(branches.sees[at, :width])
            return tree_mask(sees, root, padded, self._group_heads, self._dtype)
        seen = torch.from_numpy(entries.end[at, None] - np.arange(width)[::-1])
        return decode_mask(seen, padded, self._group_heads, self._dtype)

    def _blocks_of(self, rows: IntArray, num_blocks: IntArray) -> Tensor:
        """Rows' blocks, as many as the first one has: a row with fewer repeats its first."""
        longest = int(num_blocks[0])
        blocks = self._rows.block_table[rows, :longest].astype(np.int64)
        outside = np.arange(longest) >= num_blocks[:, None]
        np.copyto(blocks, blocks[:, :1], where=outside)
        return torch.from_numpy(blocks.reshape(-1))

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
