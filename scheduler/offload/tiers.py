"""`Tiers`: the CPU tier's slots in front of slower tiers. What misses here is asked for there and brought up.

Slow tiers answer through callbacks, each exactly once and within a deadline (`runtime.tiers.jobs`), so a promotion
always ends, after an error of our own too: requests wait for it. Whatever arrived is a hit in the slots then; whatever
did not is a miss, and somebody computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slipring.scheduler.offload.key import OffloadKey
from slipring.scheduler.offload.slots import Lookup, SlotIndex, StorePlan

CPU = "cpu"
"""The name of the tier of slots."""
PASSED_OVER = 0.99
"""What is left of the seconds that a load is known to take, each time that nothing is loaded because of them: whoever
was slow is tried again some day."""
Results = Callable[[list[bool]], None]


class SlowTier(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def page_seconds(self) -> float:
        """What a page's load has lately taken, several at once; 0 as long as that is not known."""
        ...

    def passed_over(self) -> None:
        """It was not asked, because `page_seconds` are too many."""
        ...

    def lookup(self, keys: Sequence[OffloadKey], done: Results) -> None: ...

    def load(self, keys: Sequence[OffloadKey], slots: Sequence[int], done: Results) -> None: ...

    def store(self, keys: Sequence[OffloadKey], slots: Sequence[int], done: Results) -> bool: ...


@dataclass(slots=True)
class TierStats:
    """Keys; these only grow."""

    queries: int = 0
    hits: int = 0
    """Of the queries, found in the slots."""
    promoted: int = 0
    """Found in a slower tier and brought up."""
    failed: int = 0
    """Found, and then not to be had: recomputed."""
    reused_from: Counter[str] = field(default_factory=Counter)
    """What a request was admitted with, by the tier that had it."""
    evicted: int = 0
    stores_skipped: int = 0
    """Not stored, because every slot was in use."""


@dataclass(slots=True)
class _Promotion:
    done: Callable[[], None]
    over: bool = False


class Tiers:
    def __init__(self, slots: SlotIndex, slow: Sequence[SlowTier] = ()) -> None:
        self.slots = slots
        self.stats = TierStats()
        self.on_arrival: set[Callable[[], None]] = set()
        """Called when a promotion has ended, so that whoever waits may look again."""
        self.on_stored: set[Callable[[], None]] = set()
        """Called when blocks of a device have arrived in slots, and when slots have in a slower tier, or never will."""
        self.num_handing_down = 0
        """Stores of slower tiers under way; `on_stored` tells when one has ended."""
        self._slow = list(slow)
        self._num_promoting = 0
        self._brought_by: dict[OffloadKey, str] = {}
        """Of keys that lie in the slots and have not been loaded since: the tier that they were brought up from."""

    @property
    def busy(self) -> bool:
        """A promotion is under way; `on_arrival` will be called."""
        return self._num_promoting > 0

    def hit_run(self, keys: Sequence[OffloadKey]) -> tuple[int, bool]:
        """(how many leading keys can be loaded now, whether the next one is on its way)."""
        for count, key in enumerate(keys):
            found = self.slots.lookup(key)
            if found is not Lookup.HIT:
                return count, found is Lookup.PENDING
        return len(keys), False

    def promote(
        self, keys: Sequence[OffloadKey], recompute_s: float, done: Callable[[], None], source: str | None = None
    ) -> bool:
        """Begin to bring up what the slots miss of `keys`, a prefix that could be computed in `recompute_s` seconds.
        False: there is nobody to ask; `done` is not called then. Otherwise it is, once.

        Tiers that take longer than that are not asked, except for `source`, which is asked first.
        """
        missing = [key for key in keys if self.slots.lookup(key) is Lookup.MISS]
        self.stats.queries += len(keys)
        self.stats.hits += len(keys) - len(missing)
        if not missing or not self._slow:
            return False
        self._num_promoting += 1
        promotion = _Promotion(done)
        block_s = recompute_s / len(keys)
        asked = [tier for tier in self._slow if tier.name == source]
        for tier in self._slow:
            if tier.name == source:
                continue
            if tier.page_seconds <= block_s:
                asked.append(tier)
            else:
                tier.passed_over()
        self._ask(asked, missing, promotion)
        return True

    def stored(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        """New content lies in these slots: readable from now on, and handed down to every slower tier."""
        self.slots.complete_store(keys, slots, success=True)
        self._hand_down(keys, self._slow)
        self._tell_stored()

    def loaded(self, keys: Sequence[OffloadKey]) -> list[str]:
        """These have reached the device; returns the tiers that had them."""
        return [self._brought_by.pop(key, CPU) for key in keys]

    def reused(self, counts: Counter[str]) -> None:
        """A request was spared the computation of so many blocks, by the tier that had them."""
        self.stats.reused_from.update(counts)

    def reset(self) -> None:
        """Forget what lies in the slots. What is under way ends as ever."""
        self.slots.reset()
        self._brought_by.clear()

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """These had to go from the slots."""
        self.stats.evicted += len(keys)
        for key in keys:
            self._brought_by.pop(key, None)

    # --- promotion: ask one tier after the other --------------------------------------------------------------------

    def _ask(self, tiers: Sequence[SlowTier], keys: list[OffloadKey], promotion: _Promotion) -> None:
        # Others may have brought up some in the meantime, or are about to.
        keys = [key for key in keys if self.slots.lookup(key) is Lookup.MISS]
        if not tiers or not keys:
            self._end(promotion)
        else:
            looked = self._step(promotion, len(keys), lambda found: self._fetch(tiers, keys, found, promotion))
            tiers[0].lookup(keys, looked)

    def _fetch(
        self, tiers: Sequence[SlowTier], keys: list[OffloadKey], found: list[bool], promotion: _Promotion
    ) -> None:
        tier, others = tiers[0], tiers[1:]
        plan = self._make_room([key for key, is_there in zip(keys, found, strict=True) if is_there])
        if not plan.keys:
            self._ask(others, keys, promotion)
            return
        self.evicted(plan.evicted)

        def loaded(results: list[bool]) -> None:
            for key, slot, good in zip(plan.keys, plan.slots, results, strict=True):
                self.slots.complete_store([key], [slot], success=good)
            self.stats.promoted += sum(results)
            self.stats.failed += len(results) - sum(results)
            good = [key for key, is_good in zip(plan.keys, results, strict=True) if is_good]
            self._brought_by.update(dict.fromkeys(good, tier.name))
            self._hand_down(good, self._slow[: self._slow.index(tier)])
            self._ask(others, keys, promotion)

        tier.load(plan.keys, plan.slots, self._step(promotion, len(plan.keys), loaded))

    def _step(self, promotion: _Promotion, num_keys: int, step: Results) -> Results:
        """A callback that ends the promotion when it fails; the error is the caller's to report. A key that there is no
        answer for is one that was not to be had."""

        def guarded(results: list[bool]) -> None:
            try:
                step((results + [False] * num_keys)[:num_keys])
            except Exception:
                self._end(promotion)
                raise

        return guarded

    def _make_room(self, keys: list[OffloadKey]) -> StorePlan:
        """Slots for as much of this prefix as there is room for."""
        while keys:
            plan = self.slots.prepare_store(keys)
            if plan is not None:
                return plan
            self.stats.stores_skipped += len(keys) - len(keys) // 2
            keys = keys[: len(keys) // 2]
        return StorePlan([], [], [])

    def _end(self, promotion: _Promotion) -> None:
        if promotion.over:
            return
        promotion.over = True
        self._num_promoting -= 1
        promotion.done()
        for arrived in list(self.on_arrival):
            arrived()

    def _hand_down(self, keys: Sequence[OffloadKey], tiers: Sequence[SlowTier]) -> None:
        ready = [key for key in keys if self.slots.lookup(key) is Lookup.HIT]
        for tier in tiers if ready else ():
            slots = self.slots.prepare_load(ready)
            self.num_handing_down += 1
            if not tier.store(ready, slots, lambda _, slots=slots: self._handed_down(ready, slots)):
                self._handed_down(ready, slots)

    def _handed_down(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self.num_handing_down -= 1
        self.slots.complete_load(keys, slots)
        self._tell_stored()

    def _tell_stored(self) -> None:
        for told in list(self.on_stored):
            told()
