"""`Offload`: one replica's traffic with the tiers. What its requests want loaded, and what they leave behind.

    in line ──begin──▶ promoting (slow tiers → slots) ──▶ at the head: loading (slots → device) ──▶ admitted
    block full and returned ──offer──▶ storing (device → slots) ──▶ handed down

A load fills blocks of the pool on behalf of a request that still waits: they enter the prefix index when they have
arrived, and the admission finds them there like any others. No row is involved, so nothing about rows changes, and a
load that fails, in part or whole, just leaves something to compute. Until then the request is held back, others pass
it, and its blocks (those found, and those being filled) are held so that they cannot be evicted.

A block that a transfer names is fenced: it has a reference of the transfer's own until the worker has acknowledged
it. A step in flight may still write into a block for its last owner, so a load is not told to the worker before every
step is back that was out when its blocks were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.loads import Loads, Prefetch
from slipring.scheduler.offload.port import Int32Array
from slipring.scheduler.offload.stores import Stores
from slipring.scheduler.offload.tiers import Tiers
from slipring.scheduler.offload.transfers import OffloadStats, Outbox, Transfer, TransferKind
from slipring.scheduler.request import Request


class Offload:
    """An `OffloadPort`; see there for what its methods promise."""

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        block_size: int,
        wake: Callable[[], None] = lambda: None,
        recompute_s: Callable[[int], float] = lambda num_tokens: float("inf"),
        max_store_share: float = 0.25,
        stats: OffloadStats | None = None,
    ) -> None:
        """`wake`: something has arrived that a request may have waited for. `recompute_s`: the seconds that it would
        take to compute so many tokens. At most `max_store_share` of the pool is fenced for stores at a time.
        """
        self.stats = stats or OffloadStats()
        self._tiers = tiers
        self._wake = wake
        self._outbox = Outbox()
        self._loads = Loads(tiers, pool, block_size, self._outbox, self.stats, recompute_s)
        self._stores = Stores(tiers, pool, block_size, self._outbox, self.stats, max_store_share)
        tiers.on_arrival.add(wake)

    @property
    def num_under_way(self) -> int:
        return len(self._outbox)

    @property
    def busy(self) -> bool:
        return bool(self._outbox) or self._tiers.busy

    def prefetch_of(self, request: Request) -> Prefetch | None:
        """What it has under way; None once it is admitted, or when there is nothing to be had."""
        return self._loads.prefetch_of(request)

    def begin(self, request: Request) -> None:
        self._loads.begin(request)

    def holds_back(self, request: Request, num_free: int, last_step: int) -> bool:
        return self._loads.holds_back(request, num_free, last_step)

    def admitted(self, request: Request, num_found: int) -> int:
        return self._loads.admitted(request, num_found)

    def forget(self, request: Request) -> None:
        self._loads.forget(request)

    def give_way(self) -> bool:
        return self._loads.give_way()

    def offer(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        self._stores.offer(request, first, blocks)

    def ended(self, request: Request, blocks: Sequence[int]) -> None:
        self._stores.ended(request, blocks)

    def take_transfers(self, oldest_step: int) -> list[Transfer]:
        return self._outbox.take(oldest_step)

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        self._outbox.complete(transfer_id, success, seconds)

    def close(self) -> None:
        self._tiers.on_arrival.discard(self._wake)
        slots = self._tiers.slots
        for transfer in self._outbox.under_way:
            if transfer.kind is TransferKind.STORE:
                slots.complete_store(transfer.keys, transfer.slots, success=False)
            else:
                slots.complete_load(transfer.keys, transfer.slots)
        self._outbox.clear()
        self._loads.clear()
        self._stores.clear()

    def held_blocks(self) -> list[Int32Array]:
        stored = [item.blocks for item in self._outbox.under_way if item.kind is TransferKind.STORE]
        return [np.asarray(blocks, np.int32) for blocks in self._loads.held_blocks() + stored]
