"""Handle records: complete before they are seen, of one epoch only, and unmapped before anything is freed."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slipring.shm.ipc import HANDLE_BYTES, HandleExchange, HandleState, exchange_bytes
from slipring.shm.segment import Segment

EPOCH = 3

RANK = """
import os, sys, time
from slipring.shm.ipc import HandleExchange, exchange_bytes
from slipring.shm.segment import Segment
rank, fd = int(sys.argv[1]), int(sys.argv[2])
exchange = HandleExchange.attach(Segment.attach(fd, exchange_bytes(3)), rank, 3)
time.sleep(0.1 * rank)
exchange.export(bytes([rank]) * 64, 1 << 20)
deadline = time.monotonic() + 30
while (handles := exchange.handles()) is None:
    assert time.monotonic() < deadline
    time.sleep(0.001)
assert handles == tuple(bytes([other]) * 64 for other in range(3))
exchange.mapped()
while exchange.waiting_for(2):
    assert time.monotonic() < deadline
    time.sleep(0.001)
exchange.unmapped()
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    shared = Segment.create("test", mmap.PAGESIZE)
    HandleExchange.create(shared, 2, EPOCH)
    yield shared
    shared.close()


@pytest.fixture
def ranks(segment: Segment) -> tuple[HandleExchange, HandleExchange]:
    return HandleExchange.attach(segment, 0, EPOCH), HandleExchange.attach(segment, 1, EPOCH)


def test_handles_appear_when_all_are_there(ranks: tuple[HandleExchange, HandleExchange]) -> None:
    one, two = ranks
    one.export(b"x" * HANDLE_BYTES, 4096)
    assert one.handles() is None and two.handles() is None
    assert two.waiting_for(HandleState.EXPORTED) == (1,)
    two.export(b"short", 4096)
    assert one.handles() == two.handles() == (b"x" * HANDLE_BYTES, b"short")
    assert one.pid(1) == os.getpid()


def test_an_owner_frees_when_every_living_rank_has_unmapped(ranks: tuple[HandleExchange, HandleExchange]) -> None:
    one, two = ranks
    for rank in ranks:
        rank.export(b"h", 4096)
        rank.mapped()
    one.unmapped()
    assert one.waiting_for(HandleState.UNMAPPED) == (1,)
    assert one.waiting_for(HandleState.UNMAPPED, dead={1}) == ()
    two.unmapped()
    assert one.waiting_for(HandleState.UNMAPPED) == ()


def test_a_rank_that_left_cannot_come_back(ranks: tuple[HandleExchange, HandleExchange]) -> None:
    one, two = ranks
    two.unmapped()  # failed before it exported anything: the others must not wait for it for ever
    assert one.waiting_for(HandleState.UNMAPPED) == (0,)
    with pytest.raises(ValueError, match="UNMAPPED"):
        two.mapped()
    with pytest.raises(ValueError, match="already"):
        two.export(b"h", 4096)
    one.export(b"h", 4096)
    with pytest.raises(ValueError, match="rank 1 has left epoch 3"):
        one.handles()


def test_mistakes_are_refused(segment: Segment, ranks: tuple[HandleExchange, HandleExchange]) -> None:
    one, two = ranks
    with pytest.raises(ValueError, match="epoch 3, expected 4"):
        HandleExchange.attach(segment, 0, EPOCH + 1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        HandleExchange.attach(segment, 2, EPOCH)
    with pytest.raises(ValueError, match="not a handle exchange"):
        HandleExchange.attach(Segment.create("other", mmap.PAGESIZE), 0, EPOCH)
    for handle in (b"", b"x" * (HANDLE_BYTES + 1)):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            one.export(handle, 4096)
    one.export(b"h", 4096)
    two.export(b"h", 8192)
    with pytest.raises(ValueError, match="different sizes"):
        one.handles()
    with pytest.raises(ValueError, match="creator"):
        HandleExchange(segment, None).unmapped()


def test_a_segment_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than its segment"):
        HandleExchange.create(Segment.create("test", mmap.PAGESIZE), 64, EPOCH)


def test_three_processes_exchange() -> None:
    shared = Segment.create("test", exchange_bytes(3))
    creator = HandleExchange.create(shared, 3, EPOCH)
    command = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen([*command, str(rank), str(shared.fd)], pass_fds=(shared.fd,)) for rank in range(3)
    ]  # fmt: skip
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert creator.states() == [HandleState.UNMAPPED] * 3
    assert [creator.pid(rank) for rank in range(3)] == [process.pid for process in processes]
