"""Eviction policies: what each gives up, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perf.tier_traces import TRACES, hit_ratio
from slipring.scheduler.offload.key import OffloadKey, group_of, hash_of, offload_key
from slipring.scheduler.offload.policy import POLICIES, Arc, Lru


def key(number: int) -> OffloadKey:
    return offload_key(number.to_bytes(32, "big"))


def numbers(keys: list[OffloadKey] | None) -> list[int] | None:
    return None if keys is None else [int.from_bytes(hash_of(item), "big") for item in keys]


def anything(_: OffloadKey) -> bool:
    return True


def test_keys_are_hash_and_group() -> None:
    made = offload_key(b"h" * 32, 7)
    assert (hash_of(made), group_of(made)) == (b"h" * 32, 7)
    assert made != offload_key(b"h" * 32, 8)


@pytest.mark.parametrize("name", POLICIES)
def test_the_end_of_a_prefix_goes_first(name: str) -> None:
    policy = POLICIES[name](8)
    policy.insert([key(i) for i in range(4)])
    assert numbers(policy.evict(3, anything)) == [3, 2, 1]


def test_lru_gives_up_what_was_not_asked_for() -> None:
    policy = Lru(8)
    policy.insert([key(1)])
    policy.insert([key(2)])
    policy.touch([key(1), key(9)])
    assert numbers(policy.evict(1, anything)) == [2]
    assert len(policy) == 1


def test_arc_keeps_what_was_asked_for_twice_through_a_scan() -> None:
    policy = Arc(4)
    policy.insert([key(1), key(2)])
    policy.touch([key(1), key(2)])
    for number in range(10, 30):
        if len(policy) == 4:
            assert numbers(policy.evict(1, anything)) == [number - 2]
        policy.insert([key(number)])
    assert numbers(policy.evict(4, anything)) == [28, 29, 2, 1]


def test_arc_learns_from_ghosts_in_both_directions() -> None:
    policy = Arc(2)
    policy.insert([key(1)])
    policy.insert([key(2)])
    policy.touch([key(1)])  # recent: 2; frequent: 1
    assert numbers(policy.evict(1, anything)) == [2]
    policy.insert([key(2)])  # its ghost says that recent was too short
    assert policy.target == 1.0
    assert numbers(policy.evict(1, anything)) == [1]  # both are frequent now, 1 is older
    policy.insert([key(1)])
    assert policy.target == 0.0


def test_arc_falls_back_to_the_other_list() -> None:
    policy = Arc(4)
    policy.insert([key(1), key(2)])
    policy.touch([key(2)])
    assert numbers(policy.evict(1, lambda item: item != key(1))) == [2]
    assert numbers(policy.evict(1, anything)) == [1]


def test_arc_counts_what_alone_continues_a_frequent_prefix_as_frequent() -> None:
    def turn(policy: Arc, *prefix: int, found: int) -> None:
        keys = [key(number) for number in prefix]
        policy.touch(keys[:found])
        policy.insert(keys[found:])
        policy.order(keys)

    policy = Arc(8)
    turn(policy, 1, found=0)
    turn(policy, 1, 2, found=1)
    turn(policy, 3, found=0)
    assert numbers(policy.evict(1, anything)) == [3], "2 is younger than 3, but not what a scan would leave behind"
    turn(policy, 1, 4, found=1)
    turn(policy, 5, found=0)
    assert numbers(policy.evict(1, anything)) == [4], "1 forks: what follows it must earn its place"
    assert numbers(policy.evict(3, anything)) == [5, 2, 1]


@pytest.mark.parametrize("trace", ["conversations", "polluted_by_scans"])
def test_arc_beats_lru_where_scans_pollute_and_loses_little_elsewhere(trace: str) -> None:
    lru, arc = (hit_ratio(TRACES[trace](random.Random(0)), policy) for policy in ("lru", "arc"))
    assert arc > (1.3 if trace == "polluted_by_scans" else 0.98) * lru


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(data=st.data())
def test_evict_is_all_or_nothing_and_takes_only_what_may_go(name: str, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 10))
    policy, known = POLICIES[name](capacity), set()
    for _ in range(data.draw(st.integers(0, 30))):
        operation, number = data.draw(st.tuples(st.sampled_from("itreo"), st.integers(0, 14)))
        if operation == "i" and (number in known or len(known) < capacity):
            policy.insert([key(number)])
            known.add(number)
        elif operation == "t":
            policy.touch([key(number)])
        elif operation == "o":
            policy.order([key(number), key(number // 2), key(0)])
        elif operation == "r":
            policy.remove(key(number))
            known.discard(number)
        elif operation == "e":
            pinned = data.draw(st.sets(st.integers(0, 14)))
            pinned_keys = set(map(key, pinned))
            before = copy.deepcopy(policy.__dict__)
            victims = numbers(policy.evict(number, lambda item, keep=pinned_keys: item not in keep))
            if victims is None:
                assert len(known - pinned) < number
                assert policy.__dict__ == before
            else:
                assert len(set(victims)) == len(victims) == number
                assert set(victims) <= known - pinned
                known -= set(victims)
        assert len(policy) == len(known)
    left = numbers(policy.evict(len(known), anything))
    assert left is not None and set(left) == known
