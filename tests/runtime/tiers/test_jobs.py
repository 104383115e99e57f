"""Store threads: every job is answered once, whatever the store does, and no slot is written after its job is over."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from slipring.runtime.tiers.file_store import FileStore
from slipring.runtime.tiers.jobs import StoreThreads
from slipring.scheduler.offload.key import OffloadKey
from tests.runtime.tiers.test_file_store import LAYOUT, PAGE, file_of, flip, key, page

NUM_SLOTS = 8


class SlowDisk(FileStore):
    """A file store whose every call waits for `gate`."""

    gate = threading.Event()

    def contains(self, key: OffloadKey) -> bool:
        self.gate.wait()
        return super().contains(key)

    def read(self, key: OffloadKey, into: memoryview) -> None:
        self.gate.wait()
        super().read(key, into)

    def write(self, key: OffloadKey, page: memoryview) -> bool:
        self.gate.wait()
        return super().write(key, page)


class BrokenDisk(FileStore):
    def read(self, key: OffloadKey, into: memoryview) -> None:
        raise OSError(5, "Input/output error")

    def write(self, key: OffloadKey, page: memoryview) -> bool:
        raise OSError(28, "No space left on device")


Body = Callable[[StoreThreads, np.ndarray], Awaitable[None]]


def run(store: FileStore, body: Body, **options: float) -> None:
    async def main() -> None:
        slots = np.zeros((NUM_SLOTS, PAGE), np.uint8)
        for number in range(NUM_SLOTS // 2):
            slots[number] = np.frombuffer(page(number), np.uint8)
        threads = StoreThreads(store, slots, asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(body(threads, slots), 20)
        finally:
            threads.close()

    asyncio.run(main())


async def answer(begin: Callable[..., object], *arguments: object) -> list[bool]:
    future: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
    begin(*arguments, future.set_result)  # a second answer would raise
    return await future


KEYS = [key(number) for number in range(4)]


def test_what_is_stored_is_found_and_loaded_into_other_slots(tmp_path: Path) -> None:
    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.lookup, KEYS) == [False] * 4
        assert await answer(threads.store, KEYS[:3], [0, 1, 2]) == [True] * 3
        assert await answer(threads.lookup, KEYS) == [True, True, True, False]
        assert await answer(threads.load, KEYS, [4, 5, 6, 7]) == [True, True, True, False]
        assert np.array_equal(slots[4:7], slots[:3]) and not slots[7].any()
        assert (threads.stats.loaded_bytes, threads.stats.stored_bytes) == (3 * PAGE, 3 * PAGE)
        assert threads.stats.missing == 1

    run(FileStore(tmp_path, LAYOUT, PAGE), body)


class LyingDisk(FileStore):
    """Says that it has so many of the leading keys."""

    keys_per_lookup = 2
    says = 0

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        return self.says


@pytest.mark.parametrize(("says", "found"), [(-3, 0), (1, 1), (3, 4), (2**32 - 1, 4)])
def test_a_lookup_answers_for_the_keys_that_were_asked_for(tmp_path: Path, says: int, found: int) -> None:
    store = LyingDisk(tmp_path, LAYOUT, PAGE)
    store.says = says

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.lookup, KEYS) == [True] * found + [False] * (4 - found)

    run(store, body)


class PatientDisk(FileStore):
    """Asked for one key at a time, of which the third never answers."""

    keys_per_lookup = 1
    never = threading.Event()
    asked: ClassVar[list[OffloadKey]] = []

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        self.asked.append(keys[0])
        if keys[0] == KEYS[2]:
            self.never.wait(10)
        return super().count_prefix(keys)


def test_a_lookup_that_is_late_tells_what_it_knows(tmp_path: Path) -> None:
    store = PatientDisk(tmp_path, LAYOUT, PAGE)
    for number in range(4):
        store.write(key(number), page(number))

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.lookup, KEYS) == [True, True, False, False]
        assert KEYS[3] in store.asked, "nobody waits for a neighbour"
        store.never.set()

    run(store, body, load_timeout_s=0.3)


def test_behind_a_miss_nothing_more_is_asked_for(tmp_path: Path) -> None:
    store = PatientDisk(tmp_path, LAYOUT, PAGE)
    store.asked.clear()

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.lookup, [key(90 + number) for number in range(50)]) == [False] * 50
        assert store.asked == [key(90)]

    run(store, body, num_readers=1)


def test_closing_gives_the_stores_descriptors_back(tmp_path: Path) -> None:
    def num_open() -> int:
        links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in links)

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.store, KEYS[:1], [0]) == [True] and num_open() == 2

    run(FileStore(tmp_path, LAYOUT, PAGE), body)
    deadline = time.monotonic() + 5
    while num_open():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_damaged_page_leaves_its_slot_alone(tmp_path: Path) -> None:
    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        await answer(threads.store, KEYS[:2], [0, 1])
        flip(file_of(tmp_path, 0), 3000)
        assert await answer(threads.load, KEYS[:2], [4, 5]) == [False, True]
        assert not slots[4].any() and threads.stats.corrupt == 1
        assert await answer(threads.lookup, KEYS[:1]) == [False]

    run(FileStore(tmp_path, LAYOUT, PAGE), body)


def test_a_broken_disk_is_counted(tmp_path: Path) -> None:
    FileStore(tmp_path, LAYOUT, PAGE).write(key(0), page(0))

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.load, KEYS[:1], [4]) == [False]
        assert await answer(threads.store, KEYS, [0, 1, 2, 3]) == [False] * 4
        assert threads.stats.failed == 5
        assert await answer(threads.lookup, KEYS[:1]) == [True], "its threads go on"

    run(BrokenDisk(tmp_path, LAYOUT, PAGE), body)


def test_a_slow_disk_is_given_up_on_and_then_left_alone(tmp_path: Path) -> None:
    SlowDisk.gate.set()
    SlowDisk(tmp_path, LAYOUT, PAGE).write(key(0), page(0))
    SlowDisk.gate.clear()

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        assert await answer(threads.load, KEYS[:1], [4]) == [False]
        assert threads.stats.late == 1 and threads.suspended
        began = time.monotonic()
        assert await answer(threads.lookup, KEYS[:1]) == [False]
        assert not threads.store(KEYS[:1], [0], lambda _: pytest.fail("not begun"))
        assert time.monotonic() - began < 0.04, "nobody waits for it again"
        slots[4] = 7  # somebody else's by now
        SlowDisk.gate.set()
        await asyncio.sleep(0.2)
        assert (slots[4] == 7).all(), "the late page went into a slot that is not its any more"

    run(SlowDisk(tmp_path, LAYOUT, PAGE), body, load_timeout_s=0.05)


def test_a_store_keeps_what_the_slot_held_when_it_began(tmp_path: Path) -> None:
    SlowDisk.gate.clear()

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        results: list[list[bool]] = []
        assert threads.store(KEYS[:1], [0], results.append)
        await asyncio.sleep(0.3)
        assert results == [[False]]  # too late
        slots[0] = 9
        SlowDisk.gate.set()
        threads._suspended_until = 0.0
        assert await answer(threads.load, KEYS[:1], [4]) in ([True], [False])
        assert bytes(slots[4]) in (bytes(page(0)), bytes(PAGE))

    run(SlowDisk(tmp_path, LAYOUT, PAGE), body, store_timeout_s=0.1)


def test_stores_beyond_what_may_be_pending_are_not_begun(tmp_path: Path) -> None:
    SlowDisk.gate.clear()

    async def body(threads: StoreThreads, slots: np.ndarray) -> None:
        first = asyncio.ensure_future(answer(threads.store, KEYS[:3], [0, 1, 2]))
        await asyncio.sleep(0)
        assert not threads.store(KEYS[3:], [3], lambda _: pytest.fail("not begun"))
        SlowDisk.gate.set()
        assert await first == [True] * 3
        assert await answer(threads.store, KEYS[3:], [3]) == [True]
        assert threads.stats.skipped == 1

    run(SlowDisk(tmp_path, LAYOUT, PAGE), body, max_pending_bytes=3 * PAGE)
