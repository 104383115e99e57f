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

`NullOffload` is the twin for engines without tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.key import OffloadKey, hash_of, offload_key
from slipring.scheduler.offload.tiers import Tiers
from slipring.scheduler.request import OffloadPolicy, Request

Int32Array = NDArray[np.int32]

_JOB_BLOCKS = 32
"""Blocks of one transfer: what the device, or a CPU's thread, moves in a few milliseconds."""


class TransferKind(IntEnum):
    STORE = 1
    """From the device's blocks into slots."""
    LOAD = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the worker is told: blocks[i] and slots[i] belong together."""

    transfer_id: int
    kind: TransferKind
    blocks: list[int]
    slots: list[int]
    keys: list[OffloadKey]
    """The scheduler's own business."""
    prefetch: Prefetch | None = None
    after_step: int = -1
    """The step that must be back before the worker is told."""


@dataclass(slots=True)
class Prefetch:
    """What one waiting request has under way."""

    keys: list[OffloadKey]
    promoting: bool = False
    num_loading: int = 0
    """Transfers not acknowledged."""
    settled: bool = False
    """Loaded, or found not to be worth it: the request need not wait any more."""
    abandoned: bool = False
    held: list[int] = field(default_factory=list)
    """Blocks with a reference of ours."""


@dataclass(slots=True)
class OffloadStats:
    """Of an engine, all replicas and epochs together; these only grow."""

    loaded_blocks: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    store_seconds: float = 0.0
    load_failures: int = 0
    stores_skipped: int = 0


class OffloadPort(Protocol):
    """What the scheduler knows of tiers."""

    @property
    def num_under_way(self) -> int:
        """Transfers that the worker has not acknowledged."""
        ...

    @property
    def busy(self) -> bool:
        """Something is under way that will wake the scheduler up."""
        ...

    def begin(self, request: Request) -> None:
        """It has got in line, with its prompt hashed: what slow tiers hold of it may be brought up meanwhile."""
        ...

    def holds_back(self, request: Request, num_free: int, last_step: int) -> bool:
        """It is at the head of the line, and `num_free` blocks could be its own: must it still wait for a load?

        `last_step` is the last step that was sent out.
        """
        ...

    def admitted(self, request: Request) -> None:
        """It holds its blocks itself now."""
        ...

    def forget(self, request: Request) -> None:
        """It has left the line unadmitted."""
        ...

    def offer(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """Its blocks from number `first` on are full, returned and in the prefix index: keep copies."""
        ...

    def ended(self, request: Request, blocks: Sequence[int]) -> None:
        """Its row ends, and these were its full blocks, which it holds still."""
        ...

    def give_way(self) -> bool:
        """Somebody needs blocks: let go of what waits to be admitted. Whether anything was let go of."""
        ...

    def take_transfers(self, oldest_step: int) -> list[Transfer]:
        """What the worker must be told now, in order; every step before `oldest_step` is back."""
        ...

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        """The worker has acknowledged it, and says what it took. Raises KeyError for one that is not under way."""
        ...

    def close(self) -> None:
        """The worker is gone with all its blocks: nothing of ours is under way any more. Idempotent."""
        ...

    def held_blocks(self) -> list[Int32Array]:
        """For the pool's integrity check: every reference of ours."""
        ...


class NullOffload:
    """No tiers."""

    busy = False
    num_under_way = 0

    def __init__(self, pool: BlockPool) -> None: ...

    def begin(self, request: Request) -> None: ...

    def holds_back(self, request: Request, num_free: int, last_step: int) -> bool:
        return False

    def admitted(self, request: Request) -> None: ...

    def forget(self, request: Request) -> None: ...

    def offer(self, request: Request, first: int, blocks: Sequence[int]) -> None: ...

    def ended(self, request: Request, blocks: Sequence[int]) -> None: ...

    def give_way(self) -> bool:
        return False

    def take_transfers(self, oldest_step: int) -> list[Transfer]:
        return []

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        raise KeyError(transfer_id)

    def close(self) -> None: ...

    def held_blocks(self) -> list[Int32Array]:
        return []


class Offload:
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
        take to compute so many tokens.

        At most `max_store_share` of the pool is fenced for stores at a time; the rest waits its turn.
        """
        self.stats = stats or OffloadStats()
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self._wake = wake
        self._recompute_s = recompute_s
        self._block_s = 0.0
        """What loading a block has lately taken; 0 as long as that is not known."""
        self._max_storing = max(1, int(pool.num_blocks * max_store_share))
        self._num_storing = 0
        self._backlog: dict[OffloadKey, None] = {}
        """To be stored when there is room for more stores; what the pool has lost by then is passed over."""
        self._prefetches: dict[int, Prefetch] = {}
        """By id() of the waiting request."""
        self._under_way: dict[int, Transfer] = {}
        self._outbox: list[Transfer] = []
        self._next_id = 0
        tiers.on_arrival.add(wake)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def busy(self) -> bool:
        return bool(self._under_way) or self._tiers.busy

    # --- loading ------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        if id(request) in self._prefetches:
            return
        whole = min(request.num_reusable, len(request.token_ids) - 1) // self._block_size
        if (most := request.tier_limits.max_load_tokens) is not None:
            whole = min(whole, most // self._block_size)
        if not whole:
            return
        request.extend_hashes(request.token_ids, whole, self._block_size)
        keys = [offload_key(block_hash) for block_hash in request.block_hashes[:whole]]
        self._prefetches[id(request)] = prefetch = Prefetch(keys)
        known = len(self._pool.match(request.block_hashes[: len(keys)]))
        self._tiers.slots.touch(keys[:known])

        def brought_up() -> None:
            prefetch.promoting = False

        prefetch.promoting = True
        recompute_s = self._recompute_s((len(keys) - known) * self._block_size)
        if not self._tiers.promote(keys[known:], recompute_s, brought_up, request.tier_limits.source):
            prefetch.promoting = False

    def holds_back(self, request: Request, num_free: int, last_step: int) -> bool:
        self.begin(request)
        prefetch = self._prefetches.get(id(request))
        if prefetch is None or prefetch.settled:
            return False
        if prefetch.promoting or prefetch.num_loading:
            return True
        return self._load(request, prefetch, num_free, last_step)

    def _load(self, request: Request, prefetch: Prefetch, num_free: int, last_step: int) -> bool:
        """Begin to load what can be loaded; whether the request must wait."""
        known = self._pool.match(request.block_hashes[: len(prefetch.keys)])
        wanted = prefetch.keys[len(known) :]
        count, more_to_come = self._tiers.hit_run(wanted)
        if more_to_come and self.busy:
            return True  # ours will wake us; what another replica stores is not waited for
        if not count or self._block_s * count > self._recompute_s(count * self._block_size):
            prefetch.settled = True
            return False
        need = -(-len(request.token_ids) // self._block_size) - len(known)
        if num_free - self._pool.num_free_among(known) < need:
            return False  # no room for it anyhow: the admission will say so, and it comes here again
        self._pool.take(known)
        fresh = self._pool.pop(count)
        assert fresh is not None, "there was room for more than that"
        prefetch.held = known + fresh.tolist()
        keys = wanted[:count]
        self._tiers.slots.touch(keys)
        slots = self._tiers.slots.prepare_load(keys)
        self._send(TransferKind.LOAD, fresh.tolist(), slots, keys, prefetch, last_step)
        return True

    def admitted(self, request: Request) -> None:
        self.forget(request)

    def forget(self, request: Request) -> None:
        prefetch = self._prefetches.pop(id(request), None)
        if prefetch is not None:
            prefetch.abandoned = True
            if not prefetch.num_loading:
                self._let_go(prefetch)

    def give_way(self) -> bool:
        gave = False
        for prefetch in self._prefetches.values():
            if prefetch.held and not prefetch.num_loading:
                self._let_go(prefetch)
                prefetch.settled = False
                gave = True
        return gave

    def _let_go(self, prefetch: Prefetch) -> None:
        held, prefetch.held = prefetch.held, []
        if held:
            self._pool.release(held)

    # --- storing ------------------------------------------------------------------------------------------------

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
        self._store_backlog()

    def _store_backlog(self) -> None:
        """Begin to store what may be: keys, in order, whose content the pool still has."""
        wanted: dict[OffloadKey, int] = {}
        while self._backlog and self._num_storing + len(wanted) < self._max_storing:
            key = next(iter(self._backlog))
            del self._backlog[key]
            for block in self._pool.match([hash_of(key)]):
                wanted[key] = block
        if not wanted:
            return
        plan = self._tiers.slots.prepare_store(list(wanted))
        if plan is None:
            self.stats.stores_skipped += len(wanted)
            return
        self._tiers.evicted(plan.evicted)
        if plan.keys:
            blocks = [wanted[key] for key in plan.keys]
            self._pool.take(blocks)
            self._num_storing += len(blocks)
            self._send(TransferKind.STORE, blocks, plan.slots, plan.keys)

    # --- transfers ----------------------------------------------------------------------------------------------

    def _send(
        self,
        kind: TransferKind,
        blocks: list[int],
        slots: list[int],
        keys: list[OffloadKey],
        prefetch: Prefetch | None = None,
        after_step: int = -1,
    ) -> None:
        for at in range(0, len(blocks), _JOB_BLOCKS):
            part = slice(at, at + _JOB_BLOCKS)
            transfer = Transfer(self._next_id, kind, blocks[part], slots[part], keys[part], prefetch, after_step)
            self._next_id += 1
            self._under_way[transfer.transfer_id] = transfer
            self._outbox.append(transfer)
            if prefetch is not None:
                prefetch.num_loading += 1

    def take_transfers(self, oldest_step: int) -> list[Transfer]:
        due = [transfer for transfer in self._outbox if transfer.after_step < oldest_step]
        self._outbox = [transfer for transfer in self._outbox if transfer.after_step >= oldest_step]
        return due

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        transfer = self._under_way.pop(transfer_id)
        if transfer.kind is TransferKind.STORE:
            self.stats.store_seconds += seconds
            self._stored(transfer, success)
            self._pool.release(transfer.blocks)
            self._store_backlog()
        else:
            self.stats.load_seconds += seconds
            self._loaded(transfer, success)
            self._block_s = 0.8 * self._block_s + 0.2 * seconds / len(transfer.blocks)

    def _stored(self, transfer: Transfer, success: bool) -> None:
        self._num_storing -= len(transfer.blocks)
        if success:
            self.stats.stored_blocks += len(transfer.blocks)
            self._tiers.stored(transfer.keys, transfer.slots)
        else:
            self._tiers.slots.complete_store(transfer.keys, transfer.slots, success=False)

    def _loaded(self, transfer: Transfer, success: bool) -> None:
        self._tiers.slots.complete_load(transfer.keys, transfer.slots)
        if success:
            self.stats.loaded_blocks += len(transfer.blocks)
            self._tiers.loaded(transfer.keys)
            for key, block in zip(transfer.keys, transfer.blocks, strict=True):
                self._pool.insert(hash_of(key), block)
        else:
            self.stats.load_failures += len(transfer.blocks)
        prefetch = transfer.prefetch
        assert prefetch is not None
        prefetch.num_loading -= 1
        if not prefetch.num_loading:
            prefetch.settled = True
            if prefetch.abandoned:
                self._let_go(prefetch)

    def close(self) -> None:
        self._tiers.on_arrival.discard(self._wake)
        for transfer in self._under_way.values():
            if transfer.kind is TransferKind.STORE:
                self._tiers.slots.complete_store(transfer.keys, transfer.slots, success=False)
            else:
                self._tiers.slots.complete_load(transfer.keys, transfer.slots)
        self._under_way.clear()
        self._outbox.clear()
        self._backlog.clear()
        self._prefetches.clear()

    def held_blocks(self) -> list[Int32Array]:
        prefetches = {id(prefetch): prefetch for prefetch in self._prefetches.values()}
        for transfer in self._under_way.values():
            if transfer.prefetch is not None:
                prefetches[id(transfer.prefetch)] = transfer.prefetch
        held = [prefetch.held for prefetch in prefetches.values()]
        held += [item.blocks for item in self._under_way.values() if item.kind is TransferKind.STORE]
        return [np.asarray(blocks, np.int32) for blocks in held if blocks]
