"""A shared memory segment: created under a random name, fully allocated, mapped and unlinked at once.

The creator owns the descriptor and keeps it open as long as anybody may have to be (re)started; children inherit
the descriptor and attach by number. Nothing of ours therefore ever lies in /dev/shm for longer than a few system
calls, whoever is killed. Allocation is done up front with posix_fallocate: a short /dev/shm shows here as an
OSError, never later as a SIGBUS. Where /dev/shm is short, `create` falls back to memfd_create, which is not bound
by the tmpfs's size, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets

import posix_ipc

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EACCES, errno.ENOENT, errno.EPERM, errno.EROFS)


class Segment:
    """A mapped range of shared memory, zeroed at creation. Not thread-safe; close() is idempotent."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)
        self.buf = memoryview(self._map)

    @classmethod
    def create(cls, label: str, nbytes: int) -> Segment:
        """Allocate `nbytes` of zeroed shared memory. `label` shows in the fallback's message only.

        Raises OSError (ENOSPC, ENOMEM) when neither /dev/shm nor a memfd has room.
        """
        try:
            fd = _posix_shm(nbytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            logger.warning(
                "/dev/shm has no room for the %s (%.1f MiB); using a memfd instead. In a container, start it with "
                "a larger --shm-size to use /dev/shm.",
                label,
                nbytes / 2**20,
            )
            fd = memfd(label, nbytes)
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map an inherited descriptor. Raises ValueError when the segment is smaller than `nbytes`."""
        if (actual := os.fstat(fd).st_size) < nbytes:
            raise ValueError(f"segment is {actual} bytes, expected {nbytes}")
        return cls(fd, nbytes)

    def __del__(self) -> None:
        """A descriptor is not lost with an object that nobody closed."""
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Unmap and close the descriptor. Arrays that still view the mapping keep it alive until they die."""
        if self._map is None:
            return
        with contextlib.suppress(BufferError):
            self.buf.release()
            self._map.close()
        self._map = None
        os.close(self.fd)


def memfd(label: str, nbytes: int) -> int:
    """A fully allocated anonymous file descriptor."""
    fd = os.memfd_create(f"slipring-{label}", os.MFD_CLOEXEC)
    return _allocate(fd, nbytes)


def _posix_shm(nbytes: int) -> int:
    name = f"/slipring-{secrets.token_hex(8)}"
    try:
        shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.Error as error:
        raise OSError(errno.EACCES, f"shm_open: {error}") from error
    # Unlinked before it is filled: a kill from here on leaves nothing behind.
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
    return _allocate(shared.fd, nbytes)


def _allocate(fd: int, nbytes: int) -> int:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd
