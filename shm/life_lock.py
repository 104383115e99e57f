"""A lock that a process holds for as long as it lives, so that its death is seen before the kernel has cleared it away.

A pidfd becomes readable when the last of a process is gone: its memory was given back page by page first (a gigabyte
takes a tenth of a second), its devices were closed (a CUDA context takes longer still). A robust mutex in shared memory
is released by the kernel when its owner's thread *begins* to exit, before any of that, and whoever waits for it is told
that its owner died. The wait blocks, so it has a thread of its own, which uses no CPU and ends with the process that
it waits for.

    0      ┌──────────────────────────────────────────────┐
           │ pthread_mutex_t, robust and process-shared   │  made by the creator; held by the worker's main thread
    64     └──────────────────────────────────────────────┘
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from typing import Final

from slipring.shm.segment import Segment

NBYTES: Final = 64
"""No libc's mutex is larger."""
_PROCESS_SHARED = 1
_ROBUST = 1


class LifeLock:
    """`create` in the engine, `attach` and `hold` in the worker, `watch` in the engine once it is held."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._word = ctypes.c_char.from_buffer(segment.buf)
        """Keeps the mapping alive for as long as somebody waits here."""
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._word))
        self._libc = ctypes.CDLL(None)

    @classmethod
    def create(cls) -> LifeLock:
        """Raises OSError when shared memory is short."""
        lock = cls(Segment.create("life lock", NBYTES))
        attributes = ctypes.create_string_buffer(NBYTES)
        libc = lock._libc
        _check(libc.pthread_mutexattr_init(attributes))
        _check(libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(libc.pthread_mutex_init(lock._mutex, attributes))
        return lock

    @classmethod
    def attach(cls, fd: int) -> LifeLock:
        return cls(Segment.attach(fd, NBYTES))

    def hold(self) -> None:
        """From the thread whose end is the process's end: the main thread."""
        # The kernel looks for the mutex when the process ends, so it must outlive the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._word))
        _check(self._libc.pthread_mutex_lock(self._mutex))

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death`, from another thread, as soon as the holder begins to exit.

        Must not be called before the lock is held. A worker that never held it is not watched.
        """
        threading.Thread(target=self._wait, args=(on_death,), name="slipring-life-lock", daemon=True).start()

    def _wait(self, on_death: Callable[[], None]) -> None:
        status = self._libc.pthread_mutex_lock(self._mutex)
        died = status == errno.EOWNERDEAD
        if died:
            self._libc.pthread_mutex_consistent(self._mutex)
        if died or status == 0:
            self._libc.pthread_mutex_unlock(self._mutex)
        if died:
            on_death()


def exit_status(pid: int) -> int | None:
    """How a child that is on its way out ends: its exit status, or minus the signal; None where that is not told.

    The kernel notes it before it begins to clear away. The child must not have been reaped.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            code = int(file.read().rsplit(b" ", 1)[1])
    except (OSError, ValueError, IndexError):
        return None
    return os.waitstatus_to_exitcode(code)


def _check(status: int) -> None:
    if status:
        raise OSError(status, os.strerror(status))
