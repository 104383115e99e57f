"""Access traces for the tiers' eviction policies: prefixes of block keys, as requests bring them, from fixed seeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from slipring.scheduler.offload.key import OffloadKey, offload_key
from slipring.scheduler.offload.policy import POLICIES
from slipring.scheduler.offload.slots import Lookup, SlotIndex

Trace = Iterator[list[OffloadKey]]
CAPACITY = 512
"""Blocks that the tier holds."""


def _prefix(document: int, length: int) -> list[OffloadKey]:
    return [offload_key(document.to_bytes(16, "big") + block.to_bytes(16, "big")) for block in range(length)]


def conversations(chance: random.Random) -> Trace:
    """Sixty talks at a time, each a block or two longer at every turn; old ones end, new ones begin."""
    talks = [(number, 4) for number in range(60)]
    for number in range(6000):
        at = chance.randrange(len(talks))
        talk, length = talks[at]
        yield _prefix(talk, length)
        talks[at] = (number + 60, 4) if length > 24 else (talk, length + chance.randint(1, 2))


def popular_documents(chance: random.Random) -> Trace:
    """Questions about documents whose popularity falls as 1 / rank."""
    weights = [1 / rank for rank in range(1, 401)]
    for document in chance.choices(range(400), weights, k=6000):
        yield _prefix(document, 8)


def polluted_by_scans(chance: random.Random) -> Trace:
    """Popular documents, and every now and then a batch job that reads hundreds of others once."""
    weights = [1 / rank for rank in range(1, 101)]
    scanned = 1000
    for number in range(3000):
        yield _prefix(chance.choices(range(100), weights)[0], 8)
        if number % 100 == 99:
            for _ in range(100):
                scanned += 1
                yield _prefix(scanned, 8)


def shifting_favourites(chance: random.Random) -> Trace:
    """A favourite set that fits, and is another one every thousand requests."""
    for number in range(6000):
        yield _prefix(1000 * (number // 1000) + chance.randrange(50), 8)


def one_system_prompt(chance: random.Random) -> Trace:
    """A long prefix that all share, then a question nobody repeats."""
    shared = _prefix(0, 40)
    for number in range(3000):
        yield shared + _prefix(number + 1, chance.randint(1, 12))


def talks_beside_scans(chance: random.Random) -> Trace:
    """Conversations, and a batch job every now and then."""
    scanned = 10**6
    for number, keys in enumerate(conversations(chance)):
        yield keys
        if number % 300 == 299:
            for _ in range(60):
                scanned += 1
                yield _prefix(scanned, 8)


TRACES: dict[str, Callable[[random.Random], Trace]] = {
    trace.__name__: trace
    for trace in (
        conversations,
        popular_documents,
        polluted_by_scans,
        shifting_favourites,
        one_system_prompt,
        talks_beside_scans,
    )
}


def hit_ratio(trace: Trace, policy: str, capacity: int = CAPACITY) -> float:
    """The share of all blocks asked for that lay in a tier of `capacity` slots, as a prefix from the first on."""
    index = SlotIndex(capacity, POLICIES[policy](capacity))
    asked = hits = 0
    for keys in trace:
        asked += len(keys)
        found = 0
        while found < len(keys) and index.lookup(keys[found]) is Lookup.HIT:
            found += 1
        hits += found
        index.touch(keys[:found])
        plan = index.prepare_store(keys[found:])
        assert plan is not None, "a trace's request is longer than the tier"
        index.complete_store(plan.keys, plan.slots, success=True)
        index.order(keys)
    return hits / asked


def compare(seed: int) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for name, make in TRACES.items():
        ratios = {policy: round(hit_ratio(make(random.Random(seed)), policy), 4) for policy in sorted(POLICIES)}
        rows.append({"trace": name, **ratios})
    return rows
