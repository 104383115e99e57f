"""`DirectoryQuota`: how many bytes the files of a directory may have together, whoever writes there.

Any number of threads and processes share a directory. What they hold is counted in a small file beside the pages,
read and written only under an exclusive lock (flock), and a file exists at its full size before the count is
raised, so the sum of the files' sizes never exceeds the quota, not by a byte, at no moment. A process that is killed
under the lock leaves the count marked as unsure, and the next holder counts anew.

    .lock    locked by whoever changes the count or gives files up
    .usage   two little-endian u64: unsure (0 or 1), bytes of all files
    *.kv     pages; a page's time of modification is the last time it was of use
    *.tmp    pages that are being written; the writer holds a lock on its own, so that a dead writer's can be told
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

PAGE_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
_USAGE = struct.Struct("<QQ")


class DirectoryQuota:
    def __init__(self, root: Path, quota_bytes: int | None) -> None:
        """`root` must exist. Raises OSError."""
        self._root = root
        self._quota = quota_bytes
        self._mutex = threading.Lock()
        self._lock_fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._usage_fd = os.open(root / ".usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._oldest: list[tuple[int, Path]] = []
        """Pages in the order in which they may go, oldest last, as of the last count."""
        with self._locked():
            self._count()  # whoever comes new clears up after the dead

    def close(self) -> None:
        os.close(self._lock_fd)
        os.close(self._usage_fd)

    @property
    def used_bytes(self) -> int:
        with self._locked():
            return self._used()

    def create(self, path: Path, nbytes: int) -> int | None:
        """Make room for, and make, an empty file of `nbytes` bytes, locked by its writer; returns its descriptor.

        None when the quota has no room for it even without all other pages. Raises OSError.
        """
        with self._locked():
            used = self._used()
            if self._quota is not None and used + nbytes > self._quota:
                used = self._give_up(used + nbytes - self._quota)
                if used + nbytes > self._quota:
                    return None
            with self._unsure(used):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    os.posix_fallocate(fd, 0, nbytes)
                except BaseException:
                    os.unlink(path)
                    os.close(fd)
                    raise
            self._set_used(used + nbytes)
        return fd

    def publish(self, temporary: Path, final: Path, nbytes: int) -> None:
        """The file is whole: give it its name. If somebody else has been there first, theirs stays."""
        with self._locked():
            used = self._used()
            if _size(final) == nbytes:
                used = self._unlink(temporary, used)
            else:
                used = self._unlink(final, used)  # cut off by something else: nobody can use it
                temporary.rename(final)
            self._set_used(used)

    def remove(self, path: Path) -> None:
        """Delete a file of ours, if it is still there."""
        with self._locked():
            self._set_used(self._unlink(path, self._used()))

    # --- under the lock -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:  # flock belongs to the descriptor, which our threads share
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _used(self) -> int:
        raw = os.pread(self._usage_fd, _USAGE.size, 0)
        if len(raw) == _USAGE.size:
            unsure, used = _USAGE.unpack(raw)
            if not unsure:
                return used
        return self._count()

    def _set_used(self, used: int, unsure: bool = False) -> None:
        os.pwrite(self._usage_fd, _USAGE.pack(unsure, max(0, used)), 0)

    @contextlib.contextmanager
    def _unsure(self, used: int) -> Iterator[None]:
        """While files come and go: whoever finds the count like this counts anew."""
        self._set_used(used, unsure=True)
        try:
            yield
        except BaseException:
            self._count()
            raise

    def _count(self) -> int:
        """Sum up what is there, without what dead writers left."""
        used, pages = 0, []
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    if name.endswith(TEMPORARY_SUFFIX) and _writer_is_dead(path):
                        path.unlink()
                    elif name.endswith((PAGE_SUFFIX, TEMPORARY_SUFFIX)):
                        status = path.stat()
                        used += status.st_size
                        if name.endswith(PAGE_SUFFIX):
                            pages.append((status.st_mtime_ns, path))
        self._oldest = sorted(pages, reverse=True)
        self._set_used(used)
        return used

    def _give_up(self, nbytes: int) -> int:
        """Delete the pages that were of use longest ago until `nbytes` are free; returns what is used then.

        The order is from the last count. A page that has been of use since has another time now, and is passed over.
        """
        used = self._used()
        goal, counted = used - nbytes, False
        while used > goal:
            if not self._oldest:
                if counted:
                    break
                used, counted = self._count(), True
                continue
            seen_at, path = self._oldest.pop()
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime_ns == seen_at:
                    used = self._unlink(path, used)
        self._set_used(used)
        return used

    def _unlink(self, path: Path, used: int) -> int:
        nbytes = _size(path)
        if nbytes is None:
            return used
        with self._unsure(used):
            path.unlink()
        return used - nbytes


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _writer_is_dead(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
