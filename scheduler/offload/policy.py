"""`EvictionPolicy`: which keys a full tier gives up. LRU, and ARC (Megiddo and Modha, FAST 2003).

A policy knows order only. Which keys may go at all (nobody reads or writes them) its owner says with `may_go`.
`evict` is all or nothing: when it cannot give up as many keys as asked for, nothing has changed.

A request's keys come as a prefix, first block first. Both policies rank them so that the end of a prefix goes before
its beginning: without its beginning the rest is of no use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol

from slipring.scheduler.offload.key import OffloadKey

MayGo = Callable[[OffloadKey], bool]
_Order = OrderedDict[OffloadKey, None]
"""Oldest first."""


class EvictionPolicy(Protocol):
    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """New keys, in prefix order."""
        ...

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """These keys, in prefix order, were asked for. Unknown ones are ignored."""
        ...

    def order(self, keys: Sequence[OffloadKey]) -> None:
        """These keys are one prefix whose user is done: rank them as such, without counting it as another use."""
        ...

    def remove(self, key: OffloadKey) -> None:
        """Its content is gone or worthless: forget it without a trace."""
        ...

    def evict(self, count: int, may_go: MayGo) -> list[OffloadKey] | None:
        """Give up `count` keys, least valuable first; None, and nothing changed, when so many may not go."""
        ...

    def __len__(self) -> int: ...

    def clear(self) -> None: ...


class Lru:
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._order: _Order = OrderedDict()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    order = touch

    def remove(self, key: OffloadKey) -> None:
        self._order.pop(key, None)

    def evict(self, count: int, may_go: MayGo) -> list[OffloadKey] | None:
        victims = _first(count, filter(may_go, self._order))
        if victims is None:
            return None
        for key in victims:
            del self._order[key]
        return victims

    def __len__(self) -> int:
        return len(self._order)

    def clear(self) -> None:
        self._order.clear()


class Arc:
    """Keys asked for once (`recent`) and again (`frequent`), and the ghosts of those lately evicted from each.

    A ghost that is stored again says which of the two lists was too short; `target` is the length that `recent`
    should have. A scan of keys that nobody asks for again thus flows through `recent` and leaves `frequent` alone.
    Where `recent` has nothing to give, `frequent` gives, and the other way round.

    One thing is not in the paper, which knows no prefixes: a key that alone continues one of `frequent` is frequent
    itself from the end of its request on. Or else the last turn of every conversation would have to stand in line
    with what nobody asks for again, beside a head that is of little use without it. Where prefixes fork (a system
    prompt, then anything) nothing is inherited.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._recent: _Order = OrderedDict()
        self._frequent: _Order = OrderedDict()
        self._recent_ghosts: _Order = OrderedDict()
        self._frequent_ghosts: _Order = OrderedDict()
        self._continued_by: dict[OffloadKey, OffloadKey | None] = {}
        """Of keys that are here: the one that came next in every prefix that was seen; None where they differ."""
        self.target = 0.0

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self._recent or key in self._frequent:
                self._reuse(key)
            elif key in self._recent_ghosts:
                step = max(1.0, len(self._frequent_ghosts) / len(self._recent_ghosts))
                self.target = min(float(self._capacity), self.target + step)
                del self._recent_ghosts[key]
                self._frequent[key] = None
            elif key in self._frequent_ghosts:
                step = max(1.0, len(self._recent_ghosts) / len(self._frequent_ghosts))
                self.target = max(0.0, self.target - step)
                del self._frequent_ghosts[key]
                self._frequent[key] = None
            else:
                self._recent[key] = None
        self._trim()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            self._reuse(key)

    def order(self, keys: Sequence[OffloadKey]) -> None:
        for parent, key in pairwise(keys):
            if self._goes_on_with(parent, key) and parent in self._frequent and key in self._recent:
                self._reuse(key)
        for key in reversed(keys):
            for order in (self._recent, self._frequent):
                if key in order:
                    order.move_to_end(key)

    def remove(self, key: OffloadKey) -> None:
        for order in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            order.pop(key, None)
        self._continued_by.pop(key, None)

    def evict(self, count: int, may_go: MayGo) -> list[OffloadKey] | None:
        recent, frequent = filter(may_go, self._recent), filter(may_go, self._frequent)
        num_recent = len(self._recent)
        victims: list[OffloadKey] = []
        while len(victims) < count:
            first, second = (recent, frequent) if num_recent > self.target else (frequent, recent)
            key = next(chain(first, second), None)
            if key is None:
                return None
            num_recent -= key in self._recent
            victims.append(key)
        for key in victims:
            self._give_up(key)
        self._trim()
        return victims

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def clear(self) -> None:
        for order in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            order.clear()
        self._continued_by.clear()
        self.target = 0.0

    def _goes_on_with(self, parent: OffloadKey, key: OffloadKey) -> bool:
        """Note that `key` came after `parent`; whether nothing else ever did."""
        if parent not in self._recent and parent not in self._frequent:
            return False
        if self._continued_by.setdefault(parent, key) == key:
            return True
        self._continued_by[parent] = None
        return False

    def _reuse(self, key: OffloadKey) -> None:
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
        elif key in self._frequent:
            self._frequent.move_to_end(key)

    def _give_up(self, key: OffloadKey) -> None:
        self._continued_by.pop(key, None)
        if key in self._recent:
            del self._recent[key]
            self._recent_ghosts[key] = None
        else:
            del self._frequent[key]
            self._frequent_ghosts[key] = None

    def _trim(self) -> None:
        """At most `capacity` of recent and its ghosts; at most twice that of everything."""
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self._capacity:
            self._recent_ghosts.popitem(last=False)
        while self._frequent_ghosts and len(self) + self._num_ghosts > 2 * self._capacity:
            self._frequent_ghosts.popitem(last=False)

    @property
    def _num_ghosts(self) -> int:
        return len(self._recent_ghosts) + len(self._frequent_ghosts)


POLICIES: dict[str, type[Lru] | type[Arc]] = {"lru": Lru, "arc": Arc}


def _first(count: int, keys: Iterable[OffloadKey]) -> list[OffloadKey] | None:
    """The first `count` of `keys`; None when there are fewer."""
    found: list[OffloadKey] = []
    iterator: Iterator[OffloadKey] = iter(keys)
    while len(found) < count:
        key = next(iterator, None)
        if key is None:
            return None
        found.append(key)
    return found
