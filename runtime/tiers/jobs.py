"""`StoreThreads`: the threads that move pages between the CPU tier's slots and one slow store, and nothing else.

The loop hands over jobs and is called back, on the loop, once for each, whatever happens: a job that is past its
deadline counts as failed at that moment. The thread that is stuck in it goes on with a buffer of its own and finds,
before it would write into a slot, that the job is over; so a slot can be given to somebody else at once. A failed,
slow, missing or damaged page is never an error to anybody: it is counted, and recomputed.

Backpressure: stores beyond `max_pending_bytes` are not begun. Loads are not limited here: who asks for them waits.
A store that let a deadline pass is left alone for a while (`suspended`): nobody shall wait for it again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipring.runtime.tiers.store import PageCorruptError, PageMissingError, PageStore
from slipring.scheduler.offload.key import OffloadKey
from slipring.scheduler.offload.tiers import PASSED_OVER
from slipring.shm.priority import lower_priority

logger = logging.getLogger(__name__)

Slots = NDArray[np.uint8]
"""[num_slots, page_bytes]: the CPU tier."""
_COMPLAIN_EVERY_S = 30.0
_SUSPENDED_S = 30.0


@dataclass(slots=True)
class StoreStats:
    """Counters of one store; they only grow."""

    loaded_bytes: int = 0
    load_seconds: float = 0.0
    """Summed over threads, as `store_seconds`."""
    stored_bytes: int = 0
    store_seconds: float = 0.0
    missing: int = 0
    """Pages that were gone when they were asked for."""
    corrupt: int = 0
    failed: int = 0
    """Pages whose load or store raised."""
    late: int = 0
    """Pages, and lookups, that were past their deadline."""
    skipped: int = 0
    """Stores that were not begun (backpressure) or found no room below the quota."""


@dataclass(slots=True)
class _Job:
    """Some pages of one lookup, load or store. All but the first three are guarded by `lock`."""

    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    done: Callable[[list[bool]], None]
    results: list[bool]
    num_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    num_found: int = 2**63
    """Of a lookup: at most so many of the leading keys are there."""
    timer: asyncio.TimerHandle | None = None


class StoreThreads:
    """All methods on the loop's thread."""

    def __init__(
        self,
        store: PageStore,
        slots: Slots,
        loop: asyncio.AbstractEventLoop,
        *,
        num_readers: int = 4,
        num_writers: int = 2,
        load_timeout_s: float = 5.0,
        store_timeout_s: float = 60.0,
        max_pending_bytes: int = 256 << 20,
    ) -> None:
        self.stats = StoreStats()
        self.name = store.name
        self._store = store
        self._slots = slots
        self._loop = loop
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self._max_pending = max(1, max_pending_bytes // slots.shape[1])
        self._num_readers = num_readers
        self._page_s = 0.0
        """What a reader has lately taken for a page."""
        self._num_pending = 0
        """Pages of stores that are not over."""
        self._complained_at = float("-inf")
        self._suspended_until = float("-inf")
        self._counting = threading.Lock()
        self._is_closed = False
        self._num_serving = num_readers + num_writers
        """Threads that have not ended."""
        self._reads: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """(method, job, arguments), or None: end."""
        self._writes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [self._start(self._reads, i) for i in range(num_readers)]
        self._threads += [self._start(self._writes, num_readers + i) for i in range(num_writers)]

    @property
    def suspended(self) -> bool:
        return time.monotonic() < self._suspended_until

    @property
    def page_seconds(self) -> float:
        """Per page, lately, with all readers at work; 0 before the first load."""
        return self._page_s / self._num_readers

    def passed_over(self) -> None:
        """It was not asked, for being too slow: it shall be tried again some day."""
        self._page_s *= PASSED_OVER

    def lookup(self, keys: Sequence[OffloadKey], done: Callable[[list[bool]], None]) -> None:
        """done(which of them the store has): those before the first that is not there, or not known in time."""
        if self.suspended:
            self._loop.call_soon(done, [False] * len(keys))
            return

        def looked(results: list[bool]) -> None:
            count = results.index(False) if False in results else len(results)
            done([True] * count + [False] * (len(results) - count))

        parts = range(0, len(keys), self._store.keys_per_lookup)
        job = self._begin(keys, (), looked, len(parts), self._load_timeout_s)
        for first in parts:
            self._reads.put((self._look, job, first))

    def load(self, keys: Sequence[OffloadKey], slots: Sequence[int], done: Callable[[list[bool]], None]) -> None:
        """Fill slots with pages; done(which of them are good)."""
        job = self._begin(keys, slots, done, len(keys), self._load_timeout_s)
        for index in range(len(keys)):
            self._reads.put((self._load_page, job, index))

    def store(self, keys: Sequence[OffloadKey], slots: Sequence[int], done: Callable[[list[bool]], None]) -> bool:
        """Keep pages; done(which of them are kept). False, and nothing happens, when that is not the time for it."""
        if self._store.read_only:
            return False
        if self.suspended or self._num_pending + len(keys) > self._max_pending:
            self._count(skipped=len(keys))
            return False
        self._num_pending += len(keys)

        def stored(results: list[bool]) -> None:
            self._num_pending -= len(keys)
            done(results)

        job = self._begin(keys, slots, stored, len(keys), self._store_timeout_s)
        for index in range(len(keys)):
            self._writes.put((self._store_page, job, index))
        return True

    def close(self) -> None:
        """Let the threads end once they are done with the page they have, the last of them with the store; nobody is
        called back any more. Idempotent."""
        self._is_closed = True
        for thread in self._threads:
            (self._reads if thread.name.endswith("-r") else self._writes).put(None)

    # --- on the loop --------------------------------------------------------------------------------------------

    def _begin(
        self,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        done: Callable[[list[bool]], None],
        num_parts: int,
        timeout_s: float,
    ) -> _Job:
        job = _Job(list(keys), list(slots), done, [False] * len(keys), num_parts)
        job.timer = self._loop.call_later(timeout_s, self._expire, job)
        return job

    def _expire(self, job: _Job) -> None:
        with job.lock:
            if job.over:
                return
            job.over = True
            results = list(job.results)
            num_late = job.num_left
        self._count(late=num_late)
        self._suspended_until = time.monotonic() + _SUSPENDED_S
        self._complain(f"a transfer took too long; it is left alone for {_SUSPENDED_S:.0f} s", None)
        job.done(results)

    def _finish(self, job: _Job) -> None:
        assert job.timer is not None
        job.timer.cancel()
        with job.lock:
            if job.over:
                return
            job.over = True
            results = list(job.results)
        job.done(results)

    # --- in the threads -----------------------------------------------------------------------------------------

    def _start(self, work: queue.SimpleQueue[Any], index: int) -> threading.Thread:
        kind = "r" if work is self._reads else "w"
        name = f"slipring-{self._store.name}-{index}-{kind}"
        thread = threading.Thread(target=self._serve, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def _serve(self, work: queue.SimpleQueue[Any]) -> None:
        if work is self._writes:
            lower_priority()  # nobody waits for a store
        buffer = np.empty(self._slots.shape[1], np.uint8)
        while (item := work.get()) is not None and not self._is_closed:
            function, job, *rest = item
            try:
                function(job, buffer, *rest)
            except PageMissingError:
                self._count(missing=1)
            except PageCorruptError as error:
                self._count(corrupt=1)
                self._complain("a damaged page was thrown away", error)
            except Exception as error:  # whatever a client library raises: the page is recomputed
                self._count(failed=1)
                self._complain("a transfer failed", error)
            self._end_part(job)
        with self._counting:
            self._num_serving -= 1
            if self._num_serving:
                return
        self._store.close()

    def _end_part(self, job: _Job) -> None:
        with job.lock:
            job.num_left -= 1
            if job.num_left or job.over:
                return
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            self._loop.call_soon_threadsafe(self._finish, job)

    def _look(self, job: _Job, buffer: NDArray[np.uint8], first: int) -> None:
        if job.over or first >= job.num_found:
            return
        keys = job.keys[first : first + self._store.keys_per_lookup]
        count = max(0, min(self._store.count_prefix(keys), len(keys)))  # of another process, perhaps
        with job.lock:
            job.results[first : first + count] = [True] * count
            if count < len(keys):
                job.num_found = min(job.num_found, first + count)

    def _load_page(self, job: _Job, buffer: NDArray[np.uint8], index: int) -> None:
        if job.over:
            return
        began = time.monotonic()
        self._store.read(job.keys[index], buffer.data)
        with job.lock:
            if job.over:
                return
            self._slots[job.slots[index]] = buffer
            job.results[index] = True
        seconds = time.monotonic() - began
        self._page_s = 0.9 * self._page_s + 0.1 * seconds if self._page_s else seconds
        self._count(loaded_bytes=buffer.nbytes, load_seconds=seconds)

    def _store_page(self, job: _Job, buffer: NDArray[np.uint8], index: int) -> None:
        began = time.monotonic()
        with job.lock:
            if job.over:
                return
            buffer[:] = self._slots[job.slots[index]]  # a copy: the slot is somebody else's once the job is over
        kept = self._store.write(job.keys[index], buffer.data)
        job.results[index] = kept
        self._count(skipped=not kept, stored_bytes=buffer.nbytes * kept, store_seconds=time.monotonic() - began)

    def _count(self, **amounts: float) -> None:
        with self._counting:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)

    def _complain(self, what: str, error: Exception | None) -> None:
        """Once in a while: a broken disk must not fill the log."""
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAIN_EVERY_S:
            self._complained_at = now
            logger.warning("KV tier %s: %s%s; blocks are recomputed", self.name, what, f" ({error})" if error else "")
