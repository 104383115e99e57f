"""`BlockMover`: copies blocks between the CPU worker's pool and the CPU tier's slots, beside the steps.

Stores and loads have a thread each, so that neither waits for the other; a store's thread is nice, for nobody waits
for it. Each direction is done in order. The engine sends a load only when every step that could still write into its
blocks is back, and keeps every block that a transfer names from everybody else until it is acknowledged, so nothing
here needs to know of steps.

numpy copies, not torch: torch would bring the threads of the forward pass to bear on them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipring.shm.control import BlocksMoved, MoveBlocks
from slipring.shm.pages import CanonicalPageMapping
from slipring.shm.priority import lower_priority

Bytes = NDArray[np.uint8]


class BlockMover:
    def __init__(
        self,
        pool: Bytes,
        slots: Bytes,
        mapping: CanonicalPageMapping,
        acknowledge: Callable[[BlocksMoved], None],
    ) -> None:
        """pool [planes, num_blocks, bytes of a block's part]; slots [num_slots, canonical page bytes].

        `acknowledge` is called from the threads, once for each transfer.
        """
        self._pool = pool
        self._slots = slots
        self._mapping = mapping
        self._acknowledge = acknowledge
        self._queues: dict[bool, queue.SimpleQueue[MoveBlocks]] = {}
        for is_load, name in ((True, "kv-load"), (False, "kv-store")):
            self._queues[is_load] = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(is_load,), name=name, daemon=True).start()

    def submit(self, transfer: MoveBlocks) -> None:
        self._queues[transfer.is_load].put(transfer)

    def _serve(self, is_load: bool) -> None:
        if not is_load:
            lower_priority()
        work = self._queues[is_load]
        page = np.empty(self._mapping.local_bytes, np.uint8)
        while True:
            transfer = work.get()
            began = time.monotonic()
            try:
                for block, slot in zip(transfer.blocks, transfer.slots, strict=True):
                    (self._load if transfer.is_load else self._store)(block, self._slots[slot], page)
                error = None
            except Exception as failure:  # what it is, the engine must know that the transfer is over
                error = f"{type(failure).__name__}: {failure}"
            self._acknowledge(BlocksMoved(transfer.transfer_id, time.monotonic() - began, error))

    def _store(self, block: int, slot: Bytes, page: Bytes) -> None:
        if self._mapping.is_identity:
            _as_block(slot, self._pool)[:] = self._pool[:, block]
        else:
            _as_block(page, self._pool)[:] = self._pool[:, block]
            self._mapping.store(page, slot)

    def _load(self, block: int, slot: Bytes, page: Bytes) -> None:
        if self._mapping.is_identity:
            self._pool[:, block] = _as_block(slot, self._pool)
        else:
            self._mapping.load(slot, page)
            self._pool[:, block] = _as_block(page, self._pool)


def _as_block(page: Bytes, pool: Bytes) -> Bytes:
    """[bytes] as [planes, bytes of a block's part]."""
    return page.reshape(pool.shape[0], pool.shape[2])
