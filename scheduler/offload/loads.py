"""`Loads`: blocks of the pool that are filled from tiers on behalf of requests that still wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.key import OffloadKey, hash_of, offload_key
from slipring.scheduler.offload.tiers import PASSED_OVER, Tiers
from slipring.scheduler.offload.transfers import OffloadStats, Outbox, Transfer, TransferKind
from slipring.scheduler.request import Request


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
    loaded_from: dict[OffloadKey, str] = field(default_factory=dict)
    """Of the blocks held that were loaded, the tier that had each."""


class Loads:
    """The methods that `OffloadPort` names do what it says."""

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        block_size: int,
        outbox: Outbox,
        stats: OffloadStats,
        recompute_s: Callable[[int], float],
    ) -> None:
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self._outbox = outbox
        self._stats = stats
        self._recompute_s = recompute_s
        self._block_s = 0.0
        """What loading a block has lately taken; 0 as long as that is not known."""
        self._waiting: dict[int, Prefetch] = {}
        """By id() of the request."""
        self._loading: list[Prefetch] = []
        """Those with transfers under way, their requests gone or not."""

    def prefetch_of(self, request: Request) -> Prefetch | None:
        return self._waiting.get(id(request))

    def begin(self, request: Request) -> None:
        if id(request) in self._waiting:
            return
        whole = min(request.num_reusable, len(request.token_ids) - 1) // self._block_size
        if (most := request.tier_limits.max_load_tokens) is not None:
            whole = min(whole, most // self._block_size)
        if not whole:
            return
        request.extend_hashes(request.token_ids, whole, self._block_size)
        keys = [offload_key(block_hash) for block_hash in request.block_hashes[:whole]]
        self._waiting[id(request)] = prefetch = Prefetch(keys)
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
        prefetch = self._waiting.get(id(request))
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
        if more_to_come and (self._outbox or self._tiers.busy):
            return True  # ours will wake us; what another replica stores is not waited for
        too_slow = self._block_s * count > self._recompute_s(count * self._block_size)
        if too_slow:
            self._block_s *= PASSED_OVER
        if not count or too_slow:
            prefetch.settled = True
            return False
        need = -(-len(request.token_ids) // self._block_size) - len(known)
        if num_free - self._pool.num_free_among(known) < need:
            return False  # no room for it anyhow: the admission will say so, and it comes here again
        self._pool.take(known)
        fresh = self._pool.pop(count)
        assert fresh is not None, "there was room for more than that"
        prefetch.held = known + fresh.tolist()
        self._fill(prefetch, fresh.tolist(), wanted[:count], last_step)
        return True

    def _fill(self, prefetch: Prefetch, blocks: list[int], keys: Sequence[OffloadKey], last_step: int) -> None:
        def done(transfer: Transfer, success: bool, seconds: float) -> None:
            self._loaded(prefetch, transfer, success, seconds)

        slots = self._tiers.slots
        slots.touch(keys)
        self._loading.append(prefetch)
        prefetch.num_loading = self._outbox.send(
            TransferKind.LOAD, blocks, slots.prepare_load(keys), keys, done, last_step
        )

    def _loaded(self, prefetch: Prefetch, transfer: Transfer, success: bool, seconds: float) -> None:
        self._stats.load_seconds += seconds
        self._block_s = 0.8 * self._block_s + 0.2 * seconds / len(transfer.blocks)
        self._tiers.slots.complete_load(transfer.keys, transfer.slots)
        if success:
            self._stats.loaded_blocks += len(transfer.blocks)
            prefetch.loaded_from.update(zip(transfer.keys, self._tiers.loaded(transfer.keys), strict=True))
            for key, block in zip(transfer.keys, transfer.blocks, strict=True):
                self._pool.insert(hash_of(key), block)
        else:
            self._stats.load_failures += len(transfer.blocks)
        prefetch.num_loading -= 1
        if not prefetch.num_loading:
            self._loading = [other for other in self._loading if other is not prefetch]
            prefetch.settled = True
            if prefetch.abandoned:
                self._let_go(prefetch)

    def admitted(self, request: Request, num_found: int) -> int:
        prefetch = self._waiting.get(id(request))
        if prefetch is None:
            return 0
        loaded_from: Counter[str] = Counter()
        if not request.num_admissions:
            # Behind a block that did not arrive, those that did are of no use.
            loaded_from.update(
                prefetch.loaded_from[key] for key in prefetch.keys[:num_found] if key in prefetch.loaded_from
            )
        self._tiers.reused(loaded_from)
        self.forget(request)
        return loaded_from.total()

    def forget(self, request: Request) -> None:
        prefetch = self._waiting.pop(id(request), None)
        if prefetch is not None:
            prefetch.abandoned = True
            if not prefetch.num_loading:
                self._let_go(prefetch)

    def give_way(self) -> bool:
        gave = False
        for prefetch in self._waiting.values():
            if prefetch.held and not prefetch.num_loading:
                self._let_go(prefetch)
                prefetch.settled = False
                gave = True
        return gave

    def _let_go(self, prefetch: Prefetch) -> None:
        held, prefetch.held = prefetch.held, []
        prefetch.loaded_from.clear()
        if held:
            self._pool.release(held)

    def clear(self) -> None:
        """The pool is gone, and with it whatever was held."""
        self._waiting.clear()
        self._loading.clear()

    def held_blocks(self) -> list[list[int]]:
        prefetches = {id(prefetch): prefetch for prefetch in [*self._waiting.values(), *self._loading]}
        return [prefetch.held for prefetch in prefetches.values() if prefetch.held]
