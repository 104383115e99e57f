"""Rings: order, wrap-around, full and empty, several readers, and everything again across processes with kills."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.shm import layout
from slipring.shm.doorbell import Doorbell, LoopWaiter, Waiter
from slipring.shm.layout import Phase
from slipring.shm.ring import RingReader, RingWriter
from slipring.shm.segment import Segment


def make(num_slots: int = 4, payload_bytes: int = 100, num_readers: int = 1) -> tuple[RingWriter, list[RingReader]]:
    writer = RingWriter.create("test", num_slots, payload_bytes, num_readers)
    return writer, [RingReader(writer.segment, index) for index in range(num_readers)]


def publish(writer: RingWriter, value: int) -> bool:
    slot = writer.try_claim()
    if slot is None:
        return False
    payload = np.frombuffer(writer.payload(slot), np.int64)
    payload[:] = value
    writer.publish(7, 96, value)
    return True


def read(reader: RingReader) -> int | None:
    slot = reader.try_read()
    if slot is None:
        return None
    kind, length, step_id, _ = reader.header(slot)
    values = np.frombuffer(reader.payload(slot), np.int64)
    assert kind == 7 and length == 96 and (values == step_id).all()
    reader.advance()
    return step_id


def test_words_and_slots_are_aligned() -> None:
    writer, _ = make(num_slots=3, payload_bytes=65, num_readers=2)
    base = np.frombuffer(writer.segment.buf, np.uint8).ctypes.data
    for slot in range(3):
        address = np.frombuffer(writer.payload(slot), np.uint8).ctypes.data
        assert (address - base) % layout.LINE == 0
        assert len(writer.payload(slot)) == 128


def test_a_full_ring_says_so_and_names_who_holds_it() -> None:
    writer, (fast, slow) = make(num_readers=2)
    slow.beat(Phase.RUNNING)
    assert [publish(writer, i) for i in range(5)] == [True] * 4 + [False]
    assert [read(fast) for _ in range(5)] == [0, 1, 2, 3, None]
    assert not publish(writer, 4)
    (lagging,) = writer.lagging()
    assert (lagging.index, lagging.pid, lagging.phase, lagging.read) == (1, os.getpid(), Phase.RUNNING, 0)
    assert lagging.heartbeat_ns > 0
    assert read(slow) == 0 and publish(writer, 4)


def test_looking_ahead_keeps_the_slot() -> None:
    writer, (reader,) = make(num_slots=2)
    publish(writer, 0), publish(writer, 1)
    assert reader.try_read(1) == 1 and reader.try_read(2) is None
    assert not publish(writer, 2)
    assert read(reader) == 0 and publish(writer, 2)


def test_a_foreign_or_short_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="not a slipring ring"):
        RingReader(Segment.create("test", 4096))
    writer, _ = make()
    with pytest.raises(ValueError, match="expected"):
        Segment.attach(os.dup(writer.segment.fd), writer.segment.nbytes + 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=80))
def test_every_reader_sees_every_slot_once_in_order(num_slots: int, num_readers: int, turns: list[int]) -> None:
    """A turn of 0 publishes; a turn of k lets reader k-1 read. Compared with a list and one cursor a reader."""
    writer, readers = make(num_slots, num_readers=num_readers)
    sent: list[int] = []
    cursors = [0] * num_readers
    for turn in turns:
        if turn == 0:
            fits = len(sent) - min(cursors) < num_slots
            assert publish(writer, len(sent)) == fits
            if fits:
                sent.append(len(sent))
        elif turn <= num_readers:
            want = cursors[turn - 1] if cursors[turn - 1] < len(sent) else None
            assert read(readers[turn - 1]) == want
            cursors[turn - 1] += want is not None


READER = """
import sys, time, os
from slipring.shm.ring import RingReader
from slipring.shm.segment import Segment
from slipring.shm.doorbell import Doorbell, LoopWaiter, Waiter
from slipring.shm.layout import Phase
import numpy as np
fd, nbytes, bell, index, count, pause, die_at = map(int, sys.argv[1:])
ring = RingReader(Segment.attach(fd, nbytes), index)
waiter = Waiter(Doorbell(bell), 50)
for expected in range(count):
    assert waiter.wait(lambda: ring.try_read() is not None, timeout_s=20)
    slot = ring.try_read()
    ring.beat(Phase.RUNNING)
    kind, length, step_id, _ = ring.header(slot)
    first = np.frombuffer(ring.payload(slot), np.int64).copy()
    if pause and expected % 64 == 0: time.sleep(pause / 1e3)
    again = np.frombuffer(ring.payload(slot), np.int64)
    assert step_id == expected and (first == expected).all() and (again == expected).all(), (step_id, expected)
    if expected == die_at: time.sleep(60)
    ring.advance()
"""


def spawn_reader(writer: RingWriter, bell: Doorbell, index: int, count: int, pause: int = 0, die_at: int = -1):
    fd, nbytes = writer.segment.fd, writer.segment.nbytes
    arguments = [str(value) for value in (fd, nbytes, bell.fd, index, count, pause, die_at)]
    return subprocess.Popen([sys.executable, "-c", READER, *arguments], pass_fds=(fd, bell.fd))


def publish_all(writer: RingWriter, bells: list[Doorbell], count: int) -> None:
    deadline = time.monotonic() + 60
    for value in range(count):
        while not publish(writer, value):
            assert time.monotonic() < deadline, "the readers do not keep up"
            time.sleep(0)
        for bell in bells:
            bell.ring()


def test_two_reader_processes_with_wrap_around_and_one_of_them_slow() -> None:
    writer = RingWriter.create("test", 4, 512, 2)
    bells = [Doorbell(), Doorbell()]
    readers = [spawn_reader(writer, bells[0], 0, 20_000), spawn_reader(writer, bells[1], 1, 20_000, pause=1)]
    publish_all(writer, bells, 20_000)
    assert [reader.wait(20) for reader in readers] == [0, 0]


def test_a_reader_killed_in_the_middle_is_seen_and_named() -> None:
    writer = RingWriter.create("test", 4, 512, 1)
    bell = Doorbell()
    reader = spawn_reader(writer, bell, 0, 100, die_at=2)
    deadline = time.monotonic() + 60
    while writer.reader_state(0).read < 2 and time.monotonic() < deadline:
        publish(writer, writer.published)
        bell.ring()
        time.sleep(0.001)
    while publish(writer, writer.published):
        pass
    reader.send_signal(signal.SIGKILL)
    assert reader.wait(10) == -signal.SIGKILL
    assert not publish(writer, 0), "a dead reader's slots are not reused"
    (state,) = writer.lagging()
    assert (state.pid, state.read, state.phase) == (reader.pid, 2, Phase.RUNNING)


def test_waiting_uses_no_cpu_and_ends_with_the_lifeline() -> None:
    read_end, write_end = os.pipe()
    waiter = Waiter(Doorbell(), 50, also_watch=read_end)
    before = time.process_time()
    assert not waiter.wait(lambda: False, timeout_s=0.3)
    assert time.process_time() - before < 0.05
    os.close(write_end)
    assert not waiter.wait(lambda: False)


@pytest.mark.parametrize("max_spin_us", [0, 200])
def test_the_loop_sees_every_answer_polling_or_sleeping(max_spin_us: int) -> None:
    """The other side answers at once, or after the poll has given up, at random; nothing is lost or seen twice."""

    async def scenario() -> None:
        loop, bell, rng = asyncio.get_running_loop(), Doorbell(), random.Random(3)
        there: list[int] = []
        taken: list[int] = []
        done = loop.create_future()

        def answer(number: int) -> None:
            there.append(number)
            bell.ring()

        def send() -> None:
            loop.call_later(rng.choice([0, 0, 0.0001, 0.002]), answer, len(taken))
            waiter.expect()

        def take() -> None:
            if there:
                taken.append(there.pop())
                if len(taken) == 300:
                    done.set_result(None)
                else:
                    send()

        waiter = LoopWaiter(loop, bell, lambda: bool(there), take, max_spin_us)
        send()
        await asyncio.wait_for(done, 60)
        assert taken == list(range(300))
        waiter.close()
        answer(300)
        await asyncio.sleep(0.01)
        assert len(taken) == 300, "nothing after close"
        bell.close()

    uvloop.run(scenario())


def test_a_ring_before_the_wait_is_not_lost() -> None:
    bell, seen = Doorbell(), []
    waiter = Waiter(bell, 0)
    bell.ring()
    seen.append(1)
    assert waiter.wait(lambda: bool(seen), timeout_s=1)
