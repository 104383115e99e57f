"""`Stores`: copies of the pool's full blocks on their way into slots."""

from __future__ import annotations

from collections.abc import Sequence

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.key import OffloadKey, hash_of, offload_key
from slipring.scheduler.offload.tiers import Tiers
from slipring.scheduler.offload.transfers import OffloadStats, Outbox, Transfer, TransferKind
from slipring.scheduler.request import OffloadPolicy, Request


class Stores:
    """The methods that `OffloadPort` names do what it says."""

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        block_size: int,
        outbox: Outbox,
        stats: OffloadStats,
        max_share: float,
    ) -> None:
        """At most `max_share` of the pool is fenced at a time; the rest waits its turn."""
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self._outbox = outbox
        self._stats = stats
        self._most = max(1, int(pool.num_blocks * max_share))
        self._num_fenced = 0
        self._backlog: dict[OffloadKey, None] = {}
        """To be stored when there is room for more; what the pool has lost by then is passed over."""

    def offer(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        if request.tier_limits.policy is OffloadPolicy.BLOCK_LEVEL:
            self._store(request, first, blocks)

    def ended(self, request: Request, blocks: Sequence[int]) -> None:
        if request.tier_limits.policy is OffloadPolicy.REQUEST_LEVEL:
            self._store(request, 0, blocks)
        self._tiers.slots.order([offload_key(block_hash) for block_hash in request.block_hashes[: len(blocks)]])

    def _store(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        if (most := request.tier_limits.max_store_tokens) is not None:
            blocks = blocks[: max(0, most // self._block_size - first)]
        if not blocks:
            return
        keys = [offload_key(block_hash) for block_hash in request.block_hashes[first : first + len(blocks)]]
        self._backlog.update(dict.fromkeys(keys))
        self._begin()

    def _begin(self) -> None:
        """Begin to store what may be: keys, in order, whose content the pool still has."""
        wanted: dict[OffloadKey, int] = {}
        while self._backlog and self._num_fenced + len(wanted) < self._most:
            key = next(iter(self._backlog))
            del self._backlog[key]
            for block in self._pool.match([hash_of(key)]):
                wanted[key] = block
        if not wanted:
            return
        plan = self._tiers.slots.prepare_store(list(wanted))
        if plan is None:
            self._stats.stores_skipped += len(wanted)
            return
        self._tiers.evicted(plan.evicted)
        if plan.keys:
            blocks = [wanted[key] for key in plan.keys]
            self._pool.take(blocks)
            self._num_fenced += len(blocks)
            self._outbox.send(TransferKind.STORE, blocks, plan.slots, plan.keys, self._stored)

    def _stored(self, transfer: Transfer, success: bool, seconds: float) -> None:
        self._stats.store_seconds += seconds
        self._num_fenced -= len(transfer.blocks)
        if success:
            self._stats.stored_blocks += len(transfer.blocks)
            self._tiers.stored(transfer.keys, transfer.slots)
        else:
            self._tiers.slots.complete_store(transfer.keys, transfer.slots, success=False)
        self._pool.release(transfer.blocks)
        self._begin()

    def clear(self) -> None:
        """The pool is gone."""
        self._backlog.clear()
