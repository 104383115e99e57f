"""Tiers around a scheduler and a device that remembers: whatever is loaded, late, lost or in the way, the tokens are
those of the prompt alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.key import OffloadKey, offload_key
from slipring.scheduler.offload.offload import Offload
from slipring.scheduler.offload.policy import POLICIES
from slipring.scheduler.offload.slots import SlotIndex
from slipring.scheduler.offload.tiers import Results, Tiers
from slipring.scheduler.offload.transfers import Transfer, TransferKind
from slipring.scheduler.request import OffloadPolicy, Request, TierLimits
from tests.scheduler.test_scheduler import Harness

VOCAB = 7


class SlowStore:
    """A slow tier: answers when it is told to, and fails as often as it is told to."""

    name = "slow"
    page_seconds = 0.0

    def __init__(self, slots: np.ndarray, chance: random.Random, failures: float) -> None:
        self.slots = slots
        self.pages: dict[OffloadKey, np.ndarray] = {}
        self.todo: deque[tuple[str, list[OffloadKey], list[int], Results]] = deque()
        self._chance = chance
        self._failures = failures

    def _fails(self) -> bool:
        return self._chance.random() < self._failures

    def passed_over(self) -> None:
        self.page_seconds *= 0.5

    def lookup(self, keys: Sequence[OffloadKey], done: Results) -> None:
        self.todo.append(("lookup", list(keys), [], done))

    def load(self, keys: Sequence[OffloadKey], slots: Sequence[int], done: Results) -> None:
        self.todo.append(("load", list(keys), list(slots), done))

    def store(self, keys: Sequence[OffloadKey], slots: Sequence[int], done: Results) -> bool:
        if self._fails():
            return False
        self.todo.append(("store", list(keys), list(slots), done))
        return True

    def work(self) -> bool:
        if not self.todo:
            return False
        kind, keys, slots, done = self.todo.popleft()
        results = []
        for index, key in enumerate(keys):
            good = not self._fails() and (kind == "store" or key in self.pages)
            if good and kind == "load":
                self.slots[slots[index]] = self.pages[key]
            elif good and kind == "store":
                self.pages[key] = self.slots[slots[index]].copy()
            elif kind == "load":
                self.slots[slots[index]] = -7
            results.append(good)
        done(results)
        return True


class TieredHarness(Harness):
    def __init__(
        self,
        depth: int = 2,
        *,
        num_slots: int = 64,
        policy: str = "lru",
        slow: bool = False,
        failures: float = 0.0,
        seed: int = 0,
        **overrides: object,
    ) -> None:
        self.chance = random.Random(seed)
        self.failures = failures
        self.load_s = 0.0
        """What a transfer takes."""
        self._tier_options = (num_slots, policy, slow)
        super().__init__(depth, **overrides)
        self.transfers: deque[Transfer] = deque()
        """Told to the worker, not begun."""
        self.done: deque[tuple[int, bool]] = deque()

    def recompute_s(self, num_tokens: int) -> float:
        return self.token_s * num_tokens

    def make_offload(self, pool: BlockPool) -> Offload:
        self.token_s = float("inf")
        num_slots, policy, slow = self._tier_options
        self.slots = np.full((num_slots, 4, 2), -9, np.int64)
        self.index = SlotIndex(num_slots, POLICIES[policy](num_slots))
        self.slow = SlowStore(self.slots, self.chance, self.failures)
        self.tiers = Tiers(self.index, [self.slow] if slow else [])
        self.offload = Offload(self.tiers, pool, 4, recompute_s=self.recompute_s)
        return self.offload

    def tell_worker(self) -> bool:
        due = self.scheduler.take_transfers()
        self.transfers += due
        return bool(due)

    def transfer(self) -> bool:
        if not self.transfers:
            return False
        transfer = self.transfers.popleft()
        kv = self.device.kv.reshape(-1, 4, 2)
        good = self.chance.random() >= self.failures
        for block, slot in zip(transfer.blocks, transfer.slots, strict=True):
            if transfer.kind is TransferKind.STORE:
                self.slots[slot] = kv[block] if good else -8
            else:
                kv[block] = self.slots[slot] if good else -8
        self.done.append((transfer.transfer_id, good))
        return True

    def acknowledge(self) -> bool:
        if not self.done:
            return False
        self.offload.complete(*self.done.popleft(), seconds=self.load_s)
        return True

    @property
    def actions(self) -> list[Callable[[], bool]]:
        return [
            self.publish,
            self.run_device,
            self.take_output,
            self.tell_worker,
            self.transfer,
            self.acknowledge,
            self.slow.work,
        ]

    def turn(self) -> bool:
        return any([action() for action in self.actions])

    def run(self, limit: int = 4000) -> None:
        for _ in range(limit):
            if not self.turn():
                assert not self.scheduler.has_work, "work is left and nothing moves"
                assert not self.offload.busy
                return
            self.check()
        raise AssertionError("does not come to an end")

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.index.check_integrity()

    def assert_idle(self) -> None:
        super().assert_idle()
        assert self.index.num_pinned == 0


TALK = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]


def crowd_out(harness: TieredHarness) -> None:
    """Fill the pool with other prompts."""
    others = [harness.add([i % VOCAB] * 20, max_tokens=8, seed=i) for i in range(VOCAB)]
    harness.run()
    for request in others:
        harness.assert_right(request)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slow", [False, True])
def test_a_prefix_that_the_device_has_lost_comes_back_from_a_tier(depth: int, policy: str, slow: bool) -> None:
    harness = TieredHarness(depth, policy=policy, slow=slow, num_slots=12 if slow else 64, num_blocks=12)
    first = harness.add(TALK, max_tokens=8)
    harness.run()
    crowd_out(harness)
    again = harness.add(TALK + harness.output_of[first], max_tokens=4)
    harness.run()
    harness.assert_right(again)
    assert again.num_cached_tokens == 24  # the answer's blocks too, whole and strictly below the end
    assert harness.offload.stats.loaded_blocks > 0
    if slow:
        assert harness.tiers.stats.promoted > 0
    harness.assert_idle()


def test_what_was_once_too_slow_is_tried_again() -> None:
    harness = TieredHarness(num_blocks=12)
    harness.add(TALK, max_tokens=8)
    harness.run()
    crowd_out(harness)
    harness.load_s = 10.0
    slow = harness.add(TALK, max_tokens=2)
    harness.run()
    assert slow.num_cached_tokens == 16, "before anything is known, it is tried"
    harness.load_s, harness.token_s = 0.0, 0.1
    hits = []
    for _ in range(150):
        crowd_out(harness)
        again = harness.add(TALK, max_tokens=2)
        harness.run()
        harness.assert_right(again)
        hits.append(again.num_cached_tokens)
        if hits[-1]:
            break
    assert hits[0] == 0 and hits[-1] == 16


def test_a_slow_tier_is_passed_over_but_not_forgotten() -> None:
    slow = SlowStore(np.zeros((4, 4, 2)), random.Random(0), 0.0)
    tiers = Tiers(SlotIndex(4, POLICIES["lru"](4)), [slow])
    slow.page_seconds = 1.0
    keys = [offload_key(bytes([number]) * 32) for number in range(2)]
    asked = []
    for _ in range(4):
        tiers.promote(keys, 0.6, lambda: None)
        asked.append(bool(slow.todo))
    assert asked == [False, False, True, True]


@pytest.mark.parametrize("wrong", [[True] * 3, [True], []])
@pytest.mark.parametrize("answered", ["lookup", "load"])
def test_a_promotion_ends_whatever_a_tier_answers_and_nothing_stays_pinned(answered: str, wrong: list[bool]) -> None:
    slow = SlowStore(np.zeros((4, 4, 2)), random.Random(0), 0.0)
    tiers = Tiers(SlotIndex(4, POLICIES["lru"](4)), [slow])
    ended, arrived = [], []
    tiers.on_arrival.add(lambda: arrived.append(tiers.busy))
    keys = [offload_key(bytes([number]) * 32) for number in range(2)]
    assert tiers.promote(keys, 1.0, lambda: ended.append(True))
    if answered == "load":
        slow.todo.popleft()[-1]([True, True])
    *_, done = slow.todo.popleft()
    done(wrong)
    while slow.todo:  # what was found is loaded
        kind, wanted, _, done = slow.todo.popleft()
        assert kind == "load" and len(wanted) == min(2, len(wrong))
        done([True] * len(wanted))
    assert (ended, arrived, tiers.busy) == ([True], [False], False), "once, and whoever waits has been told"
    assert tiers.hit_run(keys) == (min(2, len(wrong)), False)
    assert tiers.stats.failed == (2 - min(2, len(wrong)) if answered == "load" else 0)
    assert tiers.slots.num_pinned == 0
    tiers.slots.check_integrity()


def test_a_step_that_fails_ends_its_promotion() -> None:
    slow = SlowStore(np.zeros((4, 4, 2)), random.Random(0), 0.0)
    tiers = Tiers(SlotIndex(4, POLICIES["lru"](4)), [slow])
    ended = []
    assert tiers.promote([offload_key(bytes(32))], 1.0, lambda: ended.append(True))
    *_, done = slow.todo.popleft()
    slow.load = None  # type: ignore[method-assign]
    with pytest.raises(TypeError):
        done([True])
    assert ended == [True] and not tiers.busy


def test_tokens_count_for_the_tier_that_had_them() -> None:
    harness = TieredHarness(num_blocks=12, num_slots=12, slow=True)
    first = harness.add(TALK, max_tokens=8)
    harness.run()
    crowd_out(harness)
    gone = harness.add(TALK, max_tokens=1)
    while not harness.offload.stats.loaded_blocks:
        harness.turn()
    harness.scheduler.abort(gone)
    harness.run()
    reused = harness.tiers.stats.reused_from
    assert not reused, "it never ran, so nothing was saved"
    crowd_out(harness)
    before = reused.copy()
    again = harness.add(TALK + harness.output_of[first], max_tokens=4)
    harness.run()
    assert reused - before == {"slow": 6} and again.num_cached_tokens == 24
    assert harness.scheduler.counters.external_hits == 4 * reused.total()


@pytest.mark.parametrize("lost", [0, 1])
def test_what_arrives_behind_a_block_that_did_not_is_no_hit(lost: int) -> None:
    """A prefix of two transfers, of which one fails."""
    harness = TieredHarness(num_blocks=100, num_slots=500, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4)
    prompt = [number * number % VOCAB for number in range(4 * 45 + 1)]
    harness.add(prompt, max_tokens=2)
    harness.run()
    for seed in range(3):
        harness.add([(number * (seed + 2) + seed) % VOCAB for number in range(240)], max_tokens=2)
        harness.run()
    counters, reused = harness.scheduler.counters, harness.tiers.stats.reused_from
    hits, external, of_tier = counters.prefix_hits, counters.external_hits, reused.total()
    complete, loads = harness.offload.complete, []

    def failing(transfer_id: int, success: bool, seconds: float) -> None:
        if not again.num_admissions:
            loads.append(transfer_id)
            success = len(loads) - 1 != lost
        complete(transfer_id, success, seconds)

    harness.offload.complete = failing  # type: ignore[method-assign]
    again = harness.add(prompt, max_tokens=2)
    harness.run()
    harness.assert_right(again)
    assert len(loads) == 2, "one transfer would not do"
    found = 32 if lost else 0
    assert counters.prefix_hits - hits == counters.external_hits - external == 4 * found
    assert reused.total() - of_tier == found


def test_limits_of_a_request_hold() -> None:
    harness = TieredHarness(num_blocks=12)
    harness.add(TALK, max_tokens=8, tier_limits=TierLimits(max_store_tokens=8))
    harness.run()
    assert harness.index.num_occupied == 2
    crowd_out(harness)
    unwilling = harness.add(TALK, max_tokens=2, tier_limits=TierLimits(max_load_tokens=0))
    harness.run()
    assert unwilling.num_cached_tokens == 0 and harness.offload.stats.loaded_blocks == 0


def test_a_request_may_be_stored_at_its_end_only() -> None:
    harness = TieredHarness()
    harness.add(TALK, max_tokens=8, tier_limits=TierLimits(policy=OffloadPolicy.REQUEST_LEVEL))
    while harness.scheduler.has_work:
        assert harness.index.num_occupied == 0
        harness.turn()
    harness.run()
    assert harness.index.num_occupied == 6


@pytest.mark.parametrize("slow", [False, True])
def test_a_request_may_be_aborted_at_any_time(slow: bool) -> None:
    """Before it has a block, while its blocks are loaded, in its last step: everything is free again, and right."""
    loading = 0
    for num_actions in range(50):
        harness = TieredHarness(num_blocks=12, slow=slow, num_slots=12 if slow else 64)
        harness.add(TALK, max_tokens=8)
        harness.run()
        crowd_out(harness)
        victim = harness.add(TALK, max_tokens=3)
        for number in range(num_actions):
            harness.actions[number % len(harness.actions)]()
        loading += harness.offload.stats.loaded_blocks == 0 and harness.offload.busy
        harness.scheduler.abort(victim)
        harness.check()
        harness.run()
        again = harness.add(TALK, max_tokens=3)
        harness.run()
        harness.assert_right(again)
        harness.assert_idle()
    assert loading, "some were aborted while they were loaded"


def test_what_a_request_has_found_may_be_crowded_out_of_a_tiny_tier() -> None:
    for turns in range(12):
        harness = TieredHarness(num_blocks=12, num_slots=4)
        harness.add(TALK, max_tokens=2)
        harness.run()
        found = harness.add(TALK, max_tokens=3)
        for _ in range(turns):
            harness.turn()
        others = [harness.add([i] * 20, max_tokens=8, seed=i) for i in range(VOCAB)]
        harness.run()
        for request in (found, *others):
            harness.assert_right(request)
        harness.assert_idle()


def test_a_lost_device_leaves_the_slots_usable() -> None:
    harness = TieredHarness(num_blocks=12)
    harness.add(TALK, max_tokens=8)
    harness.run()
    crowd_out(harness)
    again = harness.add(TALK, max_tokens=4)
    while not harness.offload.stats.loaded_blocks and not harness.transfers:
        harness.turn()
    harness.offload.close()
    harness.index.check_integrity()
    assert harness.index.num_pinned == 0 and not harness.offload.busy and not harness.offload.held_blocks()
    assert again.num_cached_tokens == 0


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    depth=st.integers(1, 3),
    num_blocks=st.integers(10, 24),
    num_slots=st.integers(1, 30),
    policy=st.sampled_from(sorted(POLICIES)),
    slow=st.booleans(),
    failures=st.sampled_from([0.0, 0.1, 0.5]),
    seed=st.integers(0, 1 << 20),
    data=st.data(),
)
def test_anything_in_any_order(
    depth: int,
    num_blocks: int,
    num_slots: int,
    policy: str,
    slow: bool,
    failures: float,
    seed: int,
    data: st.DataObject,
) -> None:
    harness = TieredHarness(
        depth,
        num_slots=num_slots,
        policy=policy,
        slow=slow,
        failures=failures,
        seed=seed,
        num_blocks=num_blocks,
        max_model_len=4 * num_blocks,
    )
    chance = harness.chance
    actions = harness.actions
    requests: list[Request] = []
    aborted: set[Request] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        base = [chance.randrange(2)] * chance.choice([0, 4, 8]) + TALK[: chance.randrange(1, len(TALK))]
        most = max(1, min(12, 4 * num_blocks - len(base) - 1))
        requests.append(harness.add(base, max_tokens=chance.randint(1, most), seed=chance.randrange(3)))
        for _ in range(chance.randrange(30)):
            chance.choice(actions)()
            harness.check()
        if chance.random() < 0.2:
            victim = chance.choice(requests)
            if harness.scheduler.abort(victim):
                aborted.add(victim)
            harness.check()
    harness.run()
    for request in requests:
        if request not in aborted:
            harness.assert_right(request)
    harness.assert_idle()
