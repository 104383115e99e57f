"""The slot index against a slow model: who is in which slot, who may be evicted, and that resets lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipring.scheduler.offload.key import OffloadKey, offload_key
from slipring.scheduler.offload.policy import POLICIES, Lru
from slipring.scheduler.offload.slots import Lookup, SlotIndex


def key(number: int) -> OffloadKey:
    return offload_key(number.to_bytes(32, "big"))


KEYS = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True).map(lambda all_: [key(i) for i in all_])


class SlotMachine(RuleBasedStateMachine):
    """`content[slot]` is what a real tier would hold there; a ready key must always find its own."""

    @initialize(num_slots=st.integers(1, 8), policy=st.sampled_from(sorted(POLICIES)), threshold=st.integers(0, 2))
    def begin(self, num_slots: int, policy: str, threshold: int) -> None:
        self.index = SlotIndex(num_slots, POLICIES[policy](num_slots), threshold)
        self.content: list[OffloadKey | None] = [None] * num_slots
        self.ready: set[OffloadKey] = set()
        self.stores: list[tuple[list[OffloadKey], list[int], bool]] = []
        """(keys, slots, whether the index still knows of it)"""
        self.loads: list[tuple[list[OffloadKey], list[int]]] = []

    def _in_use(self) -> set[int]:
        return {slot for _, slots, _ in self.stores for slot in slots} | {s for _, slots in self.loads for s in slots}

    @rule(keys=KEYS)
    def store(self, keys: list[OffloadKey]) -> None:
        before = {item for item in keys if self.index.lookup(item) is not Lookup.MISS}
        plan = self.index.prepare_store(keys)
        if plan is None:
            assert {item for item in keys if self.index.lookup(item) is not Lookup.MISS} == before
            return
        assert not set(plan.slots) & self._in_use(), "a slot that somebody reads or writes was handed out"
        assert not set(plan.evicted) & set(keys)
        self.ready -= set(plan.evicted)
        for slot in plan.slots:
            self.content[slot] = None
        if plan.keys:
            self.stores.append((plan.keys, plan.slots, True))

    @precondition(lambda self: self.stores)
    @rule(success=st.booleans(), data=st.data())
    def stored(self, success: bool, data: st.DataObject) -> None:
        keys, slots, known = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        for item, slot in zip(keys, slots, strict=True):
            self.content[slot] = item
        self.index.complete_store(keys, slots, success)
        if success and known:
            self.ready |= set(keys)

    @rule(keys=KEYS)
    def load(self, keys: list[OffloadKey]) -> None:
        hits = [item for item in keys if self.index.lookup(item) is Lookup.HIT]
        assert set(hits) == set(keys) & self.ready
        slots = self.index.prepare_load(hits)
        assert [self.content[slot] for slot in slots] == hits
        self.loads.append((hits, slots))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        keys, slots = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        assert [self.content[slot] for slot in slots] == keys, "evicted while it was read"
        self.index.complete_load(keys, slots)

    @rule(keys=KEYS)
    def touch(self, keys: list[OffloadKey]) -> None:
        self.index.touch(keys)

    @rule(keys=KEYS)
    def drop(self, keys: list[OffloadKey]) -> None:
        if keys[0] in self.ready:
            self.index.drop(keys[0])
            self.ready.discard(keys[0])

    @rule()
    def reset(self) -> None:
        self.index.reset()
        self.ready.clear()
        self.stores = [(keys, slots, False) for keys, slots, _ in self.stores]

    @invariant()
    def whole(self) -> None:
        self.index.check_integrity()
        assert self.index.num_pinned == len(self._in_use())


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_no_room_beside_what_is_in_use() -> None:
    index = SlotIndex(2, Lru(2))
    plan = index.prepare_store([key(1), key(2)])
    assert plan is not None
    assert index.prepare_store([key(3)]) is None  # both are still written
    index.complete_store(plan.keys, plan.slots, True)
    slots = index.prepare_load([key(1)])
    other = index.prepare_store([key(3)])
    assert other is not None and other.evicted == [key(2)]
    index.complete_load([key(1)], slots)


@pytest.mark.parametrize(("threshold", "needed"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_a_key_is_stored_once_it_was_offered_often_enough(threshold: int, needed: int) -> None:
    index = SlotIndex(4, Lru(4), threshold)
    for _ in range(needed - 1):
        plan = index.prepare_store([key(1)])
        assert plan is not None and not plan.keys
    plan = index.prepare_store([key(1)])
    assert plan is not None and plan.keys == [key(1)]
