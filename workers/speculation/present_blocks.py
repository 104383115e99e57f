"""Rows as a draft head knows them, whose past has holes: only the blocks that it has entered, one after the other.

    the row's blocks      |  0  |  1  |  2  |  3  |  4        1 and 2 were never entered
    the head's            |  0  |  3  |  4                    `kept` 1, `missing` 2, prefix 3 blocks

A position keeps its place in the sequence, which turns its key; only where the cache holds it moves forward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slipring.shm.table import BatchTable
from slipring.workers.batch import Batch
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.entries import Entries
from slipring.workers.kv_cache import KvCache
from slipring.workers.rows import Rows
from slipring.workers.speculation.proposer import IntArray


class PresentBlocks:
    def __init__(self, table: BatchTable, rows: Rows, builder: BatchBuilder) -> None:
        """`rows`, `builder`: the target's."""
        self._rows, self._builder = rows, builder
        self._mine = Rows(table)
        self._my_builder = builder.of_rows(self._mine)
        self._size = table.shape.block_size
        self._kept = np.zeros(table.shape.num_rows, np.int64)
        """Blocks of a row's prefix that were entered."""
        self._missing = np.zeros(table.shape.num_rows, np.int64)
        """Those that were not."""

    def begin(self, row: int, entered: NDArray[np.bool_]) -> None:
        """The row has a prefix of so many blocks, entered or not."""
        self._kept[row] = kept = int(entered.sum())
        self._missing[row] = len(entered) - kept
        self._mine.block_table[row, :kept] = self._rows.block_table[row, : len(entered)][entered]

    def build_in(self, entries: Entries, kv: KvCache) -> Batch:
        """The head's batch, in its cache (`BatchBuilder.build_in`). Entries as the target has them; none reaches into
        its row's prefix."""
        missing, builder = self._missing[entries.rows], self._builder
        if missing.any():
            self._follow(entries.rows)
            builder, absent, branches = self._my_builder, missing * self._size, entries.branches
            if branches is not None:
                branches = replace(branches, root=branches.root - absent[: entries.num_decode])
            entries = replace(entries, start=entries.start - absent, branches=branches, absent=absent)
        return builder.build_in(entries, kv)

    def _follow(self, rows: IntArray) -> None:
        """Blocks behind the prefix come as rows grow."""
        table = self._rows.block_table
        column, missing = np.arange(table.shape[1]), self._missing[rows, None]
        moved = np.take_along_axis(table[rows], np.minimum(column + missing, table.shape[1] - 1), 1)
        mine = self._mine.block_table
        mine[rows] = np.where(column < self._kept[rows, None], mine[rows], moved)
