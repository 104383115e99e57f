"""`SlotIndex`: what lies in the slots of the CPU tier, who reads or writes it, and what goes when room is needed.

A slot holds one block's KV. Its life:

    free ──prepare_store──▶ written ──complete_store──▶ ready ──evicted──▶ free
                               │ failed                  │ ▲
                               └────────▶ free           └─┘ prepare_load / complete_load: pinned meanwhile

Only ready keys that nobody reads may be evicted. Whoever stores or loads says so before and after, exactly once;
`reset` forgets every key at once, and slots still in somebody's hands come back as these finish (by their epoch).
Property-tested against a slow model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from slipring.scheduler.offload.key import OffloadKey
from slipring.scheduler.offload.policy import EvictionPolicy

_WRITTEN = -1
"""`readers` of a key whose content is still on its way into the slot."""


class Lookup(Enum):
    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """Its content is on its way: ask again later."""
    RETRY = "retry"
    """A slower tier is being asked: ask again later."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    keys: list[OffloadKey]
    """Those among the offered that shall be stored, in their order."""
    slots: list[int]
    """Where each of them goes."""
    evicted: list[OffloadKey]
    """What had to go for them."""


@dataclass(slots=True)
class _Entry:
    slot: int
    readers: int


class SlotIndex:
    def __init__(self, num_slots: int, policy: EvictionPolicy, store_threshold: int = 0) -> None:
        """`store_threshold`: a key is stored only when it is offered for that many times (0 and 1: at once)."""
        self.num_slots = num_slots
        self._policy = policy
        self._threshold = store_threshold
        self._offers: dict[OffloadKey, int] = {}
        """How often each key that is not stored was offered; the oldest are forgotten first."""
        self._entries: dict[OffloadKey, _Entry] = {}
        self._free = list(range(num_slots))[::-1]
        self._orphans: dict[int, int] = {}
        """Slots that a reset took from keys in use: how many still use them."""
        self._num_pinned = 0
        """Keys that are read or written."""

    # --- asking -------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey) -> Lookup:
        entry = self._entries.get(key)
        if entry is None:
            return Lookup.MISS
        return Lookup.PENDING if entry.readers == _WRITTEN else Lookup.HIT

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Somebody had use for these keys, in prefix order, whether here or in a faster tier."""
        self._policy.touch(keys)

    def order(self, keys: Sequence[OffloadKey]) -> None:
        """The user of this prefix is done: what belongs to its end shall go before its beginning."""
        self._policy.order(keys)

    @property
    def num_occupied(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_pinned(self) -> int:
        """Slots that cannot be evicted now, because they are read or written."""
        return self._num_pinned + len(self._orphans)

    # --- loading ------------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin ready keys; returns their slots. Every key must be a HIT."""
        slots = []
        for key in keys:
            entry = self._entries[key]
            assert entry.readers != _WRITTEN, "a load of a key that is still written"
            self._num_pinned += entry.readers == 0
            entry.readers += 1
            slots.append(entry.slot)
        return slots

    def complete_load(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            entry = self._entries.get(key)
            if entry is not None and entry.slot == slot:
                entry.readers -= 1
                self._num_pinned -= entry.readers == 0
            else:
                self._release_orphan(slot)

    # --- storing ------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[OffloadKey]) -> StorePlan | None:
        """Slots for those of `keys` (in prefix order, distinct) that are not here yet. None when there is no room.

        Keys that are here already are touched. Nothing changes, except for counted offers, when the answer is None.
        """
        new = [key for key in keys if key not in self._entries]
        if self._threshold > 1:
            new = [key for key in new if self._count_offer(key) >= self._threshold]
        if not new:
            self._policy.touch(keys)
            return StorePlan([], [], [])
        evicted: list[OffloadKey] = []
        if (short := len(new) - len(self._free)) > 0:
            found = self._policy.evict(short, self._evictable_beside(set(keys)))
            if found is None:
                return None
            evicted = found
            for key in evicted:
                self._free.append(self._entries.pop(key).slot)
        self._policy.touch(keys)
        slots = [self._free.pop() for _ in new]
        for key, slot in zip(new, slots, strict=True):
            self._entries[key] = _Entry(slot, _WRITTEN)
            self._offers.pop(key, None)
        self._num_pinned += len(new)
        self._policy.insert(new)
        return StorePlan(new, slots, evicted)

    def complete_store(self, keys: Sequence[OffloadKey], slots: Sequence[int], success: bool) -> None:
        """The slots are written: readable from now on; or they are not, and nothing is here."""
        for key, slot in zip(keys, slots, strict=True):
            entry = self._entries.get(key)
            if entry is None or entry.slot != slot:
                self._release_orphan(slot)
                continue
            self._num_pinned -= 1
            entry.readers = 0
            if not success:
                self.drop(key)

    def drop(self, key: OffloadKey) -> None:
        """Its content turned out to be worthless. A key that somebody uses goes when the last of them is done."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._policy.remove(key)
        self._abandon(entry)

    def reset(self) -> None:
        """Forget everything."""
        for entry in self._entries.values():
            self._abandon(entry)
        self._entries.clear()
        self._offers.clear()
        self._policy.clear()

    # --- inside -------------------------------------------------------------------------------------------------

    def _evictable_beside(self, protected: set[OffloadKey]):
        entries = self._entries
        return lambda key: entries[key].readers == 0 and key not in protected

    def _abandon(self, entry: _Entry) -> None:
        users = 1 if entry.readers == _WRITTEN else entry.readers
        if users:
            self._num_pinned -= 1
            self._orphans[entry.slot] = users
        else:
            self._free.append(entry.slot)

    def _release_orphan(self, slot: int) -> None:
        users = self._orphans.pop(slot) - 1
        if users:
            self._orphans[slot] = users
        else:
            self._free.append(slot)

    def _count_offer(self, key: OffloadKey) -> int:
        count = self._offers.pop(key, 0) + 1
        self._offers[key] = count
        if len(self._offers) > 8 * self.num_slots:
            del self._offers[next(iter(self._offers))]
        return count

    def check_integrity(self) -> None:
        """Recompute every count. Raises AssertionError."""
        slots = [entry.slot for entry in self._entries.values()] + list(self._orphans) + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or is in two places"
        pinned = sum(entry.readers != 0 for entry in self._entries.values())
        assert pinned == self._num_pinned, "pinned count is off"
        assert len(self._policy) == len(self._entries), "the policy ranks other keys than are here"
