"""A process's death is told before the kernel has cleared it away, and with the status that it will be reaped with."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from slipring.shm.life_lock import LifeLock, exit_status

HOLDER = """
import os, signal, sys, threading
from slipring.shm.life_lock import LifeLock
lock = LifeLock.attach(int(sys.argv[1]))
lock.hold()
ballast = bytearray(int(sys.argv[2]) << 20)
ballast[::4096] = bytes(len(ballast[::4096]))
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("held", flush=True)
end = sys.stdin.readline().strip()
if end == "exit":
    sys.exit(3)
elif end == "abort":
    os.abort()
threading.Event().wait()
"""


@contextmanager
def holder(lock: LifeLock, megabytes: int = 0) -> Iterator[subprocess.Popen[str]]:
    fd = lock.segment.fd
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fd), str(megabytes)],
        pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("end", "status"), [("exit", 3), ("abort", -signal.SIGABRT), ("", -signal.SIGKILL)])
def test_every_end_is_told_with_its_status(end: str, status: int) -> None:
    lock, died = LifeLock.create(), threading.Event()
    with holder(lock) as process:
        lock.watch(died.set)
        assert not died.wait(0.05)
        assert process.stdin is not None
        if end:
            print(end, file=process.stdin, flush=True)
        else:
            process.kill()
        assert died.wait(10)
        assert exit_status(process.pid) == status
        assert process.wait(10) == status
    lock.segment.close()


def test_death_is_told_while_its_memory_is_still_being_given_back() -> None:
    """A busy machine may wake us late, so one of a few times is enough."""
    assert any(_told_first() for _ in range(5))


def _told_first() -> bool:
    lock, died, gone_then = LifeLock.create(), threading.Event(), [True]
    with holder(lock, megabytes=300) as process:
        pidfd = os.pidfd_open(process.pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)

        def on_death() -> None:
            gone_then[0] = bool(poll.poll(0))
            died.set()

        lock.watch(on_death)
        process.kill()
        assert died.wait(10)
        os.close(pidfd)
    lock.segment.close()
    return not gone_then[0]


def test_nobody_is_told_of_a_lock_that_nobody_held() -> None:
    lock, died = LifeLock.create(), threading.Event()
    lock.watch(died.set)
    assert not died.wait(0.1)
    lock.segment.close()


def test_a_closed_segment_harms_no_watcher() -> None:
    """The engine gives up an epoch whose worker is not gone yet."""
    lock, died = LifeLock.create(), threading.Event()
    with holder(lock) as process:
        lock.watch(died.set)
        lock.segment.close()
        del lock
        process.kill()
        assert died.wait(10)


def test_a_process_that_is_not_there_has_no_status() -> None:
    assert exit_status(1 << 22) is None
