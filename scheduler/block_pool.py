"""The KV blocks: reference counts, the order in which free ones are reused, and the prefix index.

One pool, one owner: only this file touches reference counts. A block is *held* (reference count above zero), *blank*
(free, no known content) or *cached* (free, content known by its hash). Blank blocks are handed out first, last freed
first; then cached ones, least recently used first. A cached block keeps its hash, and can be taken back, until it is
handed out again.

Cached blocks stand in a queue with lazy deletion: taking one back from the middle only changes its stamp, and an
entry whose stamp is stale is skipped when the queue's head passes it. Both pops are array slices.

    queue  │ stale │ stale │ live │ stale │ live │ live │ ...          │
                             ^ head: next to be evicted        ^ tail: most recently freed
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BlockHash = bytes
Int32Array = NDArray[np.int32]


class BlockPool:
    """`num_blocks` blocks, numbered from 0. All methods are O(blocks named), amortised."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref = np.zeros(num_blocks, np.int32)
        self._stamp = np.zeros(num_blocks, np.int64)
        self._next_stamp = 1
        self._blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_blank = num_blocks
        self._queue = np.zeros(2 * num_blocks + 1, np.int32)
        self._queue_stamp = np.zeros(2 * num_blocks + 1, np.int64)
        self._head = self._tail = 0
        self._num_cached = 0
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: blank and cached."""
        return self._num_blank + self._num_cached

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is still known."""
        return self._num_cached

    def pop(self, count: int) -> Int32Array | None:
        """Take `count` blocks with one reference each, or None, and nothing changes, when fewer are free."""
        if count > self.num_free:
            return None
        blank = min(count, self._num_blank)
        self._num_blank -= blank
        blocks = self._blank[self._num_blank : self._num_blank + blank][::-1].copy()
        if blank < count:
            blocks = np.concatenate([blocks, self._evict(count - blank)])
        self._ref[blocks] = 1
        return blocks

    def release(self, blocks: Sequence[int] | Int32Array) -> None:
        """Give back one reference of each block, given in sequence order.

        Those that become free line up tail first, so that the end of a sequence is evicted before its beginning.
        """
        blocks = np.asarray(blocks, np.int32)
        self._ref[blocks] -= 1
        for block in blocks[self._ref[blocks] == 0][::-1].tolist():
            if self._hash_of[block] is None:
                self._blank[self._num_blank] = block
                self._num_blank += 1
            else:
                self._enqueue(block)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest known prefix of `hashes`, without taking them (see `take`)."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these (distinct) blocks are free, so that taking them lowers `num_free`."""
        return sum(1 for block in blocks if self._ref[block] == 0)

    def take(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that `match` found."""
        for block in blocks:
            if self._ref[block] == 0:
                self._stamp[block] = 0
                self._num_cached -= 1
            self._ref[block] += 1

    def insert(self, block_hash: BlockHash, block: int) -> None:
        """Make a held block's content known. The first block of a hash stays the known one."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def forget(self, blocks: Int32Array) -> None:
        """Drop what is known of held blocks, because their content cannot be trusted."""
        for block in blocks.tolist():
            block_hash = self._hash_of[block]
            if block_hash is not None:
                del self._block_of[block_hash]
                self._hash_of[block] = None

    def forget_all(self) -> None:
        """Drop the whole prefix index; held blocks stay held."""
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        free = np.flatnonzero(self._ref == 0).astype(np.int32)
        self._blank[: len(free)] = free[::-1]
        self._num_blank = len(free)
        self._head = self._tail = self._num_cached = 0
        self._stamp[:] = 0

    def _enqueue(self, block: int) -> None:
        if self._tail == len(self._queue):
            self._compact()
        self._queue[self._tail] = block
        self._queue_stamp[self._tail] = self._stamp[block] = self._next_stamp
        self._next_stamp += 1
        self._tail += 1
        self._num_cached += 1

    def _compact(self) -> None:
        live = self._live(self._head, self._tail)
        count = len(live)
        self._queue[:count] = self._queue[live]
        self._queue_stamp[:count] = self._queue_stamp[live]
        self._head, self._tail = 0, count

    def _live(self, start: int, stop: int) -> NDArray[np.intp]:
        """Positions in [start, stop) whose entry still stands for a free block."""
        stamps = self._queue_stamp[start:stop]
        return start + np.flatnonzero(self._stamp[self._queue[start:stop]] == stamps)

    def _evict(self, count: int) -> Int32Array:
        """Take the `count` least recently used cached blocks; the caller knows that there are so many."""
        window = count
        while len(live := self._live(self._head, stop := min(self._head + window, self._tail))) < count:
            window *= 2
        live = live[:count]
        self._head = int(live[-1]) + 1 if count else stop
        blocks = self._queue[live].copy()
        self._stamp[blocks] = 0
        self._num_cached -= count
        for block in blocks.tolist():
            block_hash = self._hash_of[block]
            assert block_hash is not None
            del self._block_of[block_hash]
            self._hash_of[block] = None
        return blocks

    def check_integrity(self, holders: Sequence[Int32Array]) -> None:
        """Recompute every count from the block tables of all live rows; AssertionError says what is off."""
        expected = np.zeros(self.num_blocks, np.int32)
        for blocks in holders:
            assert len(set(blocks.tolist())) == len(blocks), "a row holds a block twice"
            expected[blocks] += 1
        assert np.array_equal(expected, self._ref), "reference counts differ from the rows' block tables"
        blank = self._blank[: self._num_blank].tolist()
        cached = self._queue[self._live(self._head, self._tail)].tolist()
        assert len(cached) == self._num_cached, "cached count is off"
        free = blank + cached
        assert len(set(free)) == len(free), "a block is free twice"
        assert sorted(free) == np.flatnonzero(self._ref == 0).tolist(), "a free block is in no list, or a held one is"
        assert all(self._hash_of[block] is None for block in blank), "a blank block has a hash"
        assert all(self._hash_of[block] is not None for block in cached), "a cached block has no hash"
        known = {block_hash: block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert known == self._block_of, "the prefix index and the blocks' hashes differ"
