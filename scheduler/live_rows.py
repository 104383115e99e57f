"""What is known of each live row, by row, and the blocks that it holds. Writes the batch table's token and block
columns; the policy (`scheduler.py`) decides, this keeps the books.

A row's blocks are the first `num_blocks[row]` entries of its block table, from `fill` to `vacate`. Blocks enter the
prefix index only when they are full of positions that have come back, and never before somebody publishes: `settle`
does it when nothing waits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.config import SchedulerConfig
from slipring.scheduler.offload.port import OffloadPort
from slipring.scheduler.request import Request, RequestStatus
from slipring.shm.table import BatchTable

Int32Array = NDArray[np.int32]


class LiveRows:
    def __init__(
        self, config: SchedulerConfig, table: BatchTable, pool: BlockPool, vocab_size: int, offload: OffloadPort
    ) -> None:
        num_rows = config.num_rows
        self._caching = config.enable_prefix_caching
        self._block_size = config.block_size
        self._block_shift = config.block_size.bit_length() - 1
        self._table = table
        self._flat_block_table = table.block_table.reshape(-1)
        self._pool = pool
        self._offload = offload
        self.request_of: list[Request | None] = [None] * num_rows
        self.num_tokens = np.zeros(num_rows, np.int32)
        """Known: prompt and returned outputs."""
        self.num_computed = np.zeros(num_rows, np.int32)
        """Positions whose step has come back."""
        self.num_scheduled = np.zeros(num_rows, np.int32)
        """Positions sent; kept while a row is in prefill (a decode row's is its dense `start`)."""
        self.num_indexed = np.zeros(num_rows, np.int32)
        """Leading blocks that are in the prefix index."""
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.limit = np.zeros(num_rows, np.int32)
        self.stop_uses = np.zeros(vocab_size, np.int32)
        """Live requests that each token stops."""
        self._to_index: list[tuple[Int32Array, Int32Array, Int32Array]] = []
        """(rows, generations, full blocks now) of returned steps."""

    def match(self, request: Request) -> list[int]:
        """Known blocks of its prefix, whole and strictly below its end: a shared block is never rewritten."""
        if not self._caching:
            return []
        whole = min(len(request.token_ids) - 1, request.num_reusable) // self._block_size
        request.extend_hashes(request.token_ids, whole, self._block_size)
        return self._pool.match(request.block_hashes[:whole])

    def fill(self, request: Request, row: int, cached: list[int], fresh: Int32Array) -> None:
        """The admission's commit: tokens and blocks into the table, counts into the columns."""
        table, num_known = self._table, len(request.token_ids)
        num_blocks = len(cached) + len(fresh)
        table.token_ids[row, :num_known] = request.token_ids
        table.block_table[row, : len(cached)] = cached
        table.block_table[row, len(cached) : num_blocks] = fresh
        table.num_prompt[row] = request.num_prompt
        table.num_known[row] = num_known
        table.limit[row] = request.limit
        table.num_blocks[row] = num_blocks
        self.num_tokens[row] = num_known
        self.num_computed[row] = self.num_scheduled[row] = len(cached) * self._block_size
        self.num_indexed[row] = len(cached)
        self.num_blocks[row] = num_blocks
        self.limit[row] = request.limit
        self.stop_uses[list(request.stop_token_ids)] += 1
        self.request_of[row] = request
        request.row = row
        request.status = RequestStatus.RUNNING

    def vacate(self, request: Request, keep: bool) -> None:
        """Give back the row's blocks. What they hold stays in the index or, without `keep`, is trusted no more."""
        row = request.row
        blocks = self._table.block_table[row, : self.num_blocks[row]]
        if keep:
            self._index(request, int(self.num_computed[row]) // self._block_size)
            self._offload.ended(request, blocks[: self.num_indexed[row]].tolist())
        else:
            self._pool.forget(blocks)
        self._pool.release(blocks)
        self.stop_uses[list(request.stop_token_ids)] -= 1
        self.request_of[row] = None
        request.row = -1

    def tokens_of(self, row: int) -> Int32Array:
        """A copy of the row's known tokens."""
        return self._table.token_ids[row, : self.num_tokens[row]].copy()

    def append_blocks(self, rows: Int32Array, blocks: Int32Array) -> tuple[Int32Array, Int32Array]:
        """One block more for each row; returns (index in its block table, first position beyond what it has now)."""
        index = self.num_blocks[rows]
        self._flat_block_table[rows * self._table.shape.max_blocks + index] = blocks
        num_blocks = index + 1
        self.num_blocks[rows] = num_blocks
        return index, num_blocks << self._block_shift

    def append_tokens(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """One token more for each row; returns how many each has now."""
        at = self.num_tokens[rows]
        self._table.token_ids[rows, at] = tokens
        at += 1
        self.num_tokens[rows] = at
        return at

    def append_runs(self, rows: Int32Array, tokens: Int32Array, counts: Int32Array) -> None:
        """The first `counts[i]` of `tokens[i]` more for each row."""
        for place in range(int(counts.max(initial=0))):
            at = counts > place
            self.append_tokens(rows[at], tokens[at, place])

    def advance_computed(self, rows: Int32Array, computed: Int32Array) -> None:
        self.num_computed[rows] = computed
        if self._caching:
            full = computed >> self._block_shift
            crossed = (full > self.num_indexed[rows]).nonzero()[0]
            if crossed.size:
                self._to_index.append((rows[crossed], self._table.generation[rows[crossed]], full[crossed]))

    def index_returned(self) -> None:
        """Put the blocks that lately became full into the prefix index."""
        for rows, generations, num_full in self._to_index:
            for row, generation, full in zip(rows.tolist(), generations.tolist(), num_full.tolist(), strict=True):
                request = self.request_of[row]
                if request is not None and self._table.generation[row] == generation:
                    self._index(request, full)
        self._to_index.clear()

    def _index(self, request: Request, num_full: int) -> None:
        row = request.row
        indexed = int(self.num_indexed[row])
        if not self._caching or num_full <= indexed:
            return
        request.extend_hashes(self._table.token_ids[row], num_full, self._block_size)
        blocks = self._table.block_table[row, indexed:num_full].tolist()
        for block_hash, block in zip(request.block_hashes[indexed:num_full], blocks, strict=True):
            self._pool.insert(block_hash, block)
        self.num_indexed[row] = num_full
        self._offload.offer(request, indexed, blocks)

    def check_integrity(self) -> list[int]:
        """Recount blocks and stop tokens from first principles; returns the live rows. Raises AssertionError."""
        held = [row for row, request in enumerate(self.request_of) if request is not None]
        blocks = [self._table.block_table[row, : self.num_blocks[row]] for row in held]
        self._pool.check_integrity(blocks + self._offload.held_blocks())
        uses = np.zeros_like(self.stop_uses)
        for row in held:
            request = self.request_of[row]
            assert request is not None and request.row == row and request.status is RequestStatus.RUNNING
            assert self.num_computed[row] <= self.num_tokens[row] <= request.limit
            assert self.num_blocks[row] * self._block_size >= self.num_computed[row]
            uses[list(request.stop_token_ids)] += 1
        assert np.array_equal(uses, self.stop_uses), "stop token uses are off"
        return held
