"""`FileStore`: pages as files, one each, in a directory that processes, versions and models may share.

    ROOT / <model and layout, 16 hex> / <2 hex> / <2 hex> / <key, hex>.kv        header (`store.py`), then the page

A page is written under a temporary name and renamed when it is whole, so a reader never sees half of one, and a
writer that is killed leaves nothing that would be read. There is no fsync: after a power failure a file may hold
anything, and its digest says so.

Reads go through the page cache, and a lookup has the kernel read ahead what it finds. Measured on a virtual disk with
pages of 720 KiB, four readers, nothing cached: 300 MB/s, with the read-ahead 750, with O_DIRECT 760; but O_DIRECT
cannot profit from what is cached (990 MB/s with a single reader), and writes half as fast. So it is not used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from slipring.runtime.tiers.quota import PAGE_SUFFIX, TEMPORARY_SUFFIX, DirectoryQuota
from slipring.runtime.tiers.store import HEADER_BYTES, PageCorruptError, PageMissingError, count_while, seal, unseal
from slipring.scheduler.offload.key import OffloadKey


class FileStore:
    name = "fs"
    read_only = False
    keys_per_lookup = 64

    def __init__(self, root: str | Path, identity: bytes, page_bytes: int, quota_bytes: int | None = None) -> None:
        """`identity`: 32 bytes that name model and layout. `quota_bytes` holds for all of `root`. Raises OSError."""
        self._identity = identity
        self._file_bytes = HEADER_BYTES + page_bytes
        self._home = Path(root) / identity[:8].hex()
        self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._quota = DirectoryQuota(Path(root), quota_bytes)

    @property
    def used_bytes(self) -> int:
        """Of the whole directory."""
        return self._quota.used_bytes

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """What is found is about to be loaded: the kernel begins to read it, all of it at once."""
        return count_while(self._begin_to_read, keys)

    def _begin_to_read(self, key: OffloadKey) -> bool:
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            if os.fstat(fd).st_size != self._file_bytes:
                return False
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            return True
        finally:
            os.close(fd)

    def contains(self, key: OffloadKey) -> bool:
        try:
            return os.stat(self._path(key)).st_size == self._file_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read(self, key: OffloadKey, into: memoryview) -> None:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise PageMissingError from None
        try:
            header = bytearray(HEADER_BYTES)
            if _read_fully(fd, [memoryview(header), into]) != self._file_bytes:
                raise PageCorruptError("the file is cut off")
            unseal(bytes(header), key, self._identity, into)
        except PageCorruptError:
            self._quota.remove(path)
            raise
        finally:
            os.close(fd)
        self._was_of_use(path)

    def write(self, key: OffloadKey, page: memoryview) -> bool:
        path = self._path(key)
        if self.contains(key):
            self._was_of_use(path)
            return True
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(f"{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
        fd = self._quota.create(temporary, self._file_bytes)
        if fd is None:
            return False
        try:
            _write_fully(fd, [memoryview(seal(key, self._identity, page)), page])
            self._quota.publish(temporary, path, self._file_bytes)
        except BaseException:
            self._quota.remove(temporary)
            raise
        finally:
            os.close(fd)
        return True

    def close(self) -> None:
        self._quota.close()

    def _path(self, key: OffloadKey) -> Path:
        name = key.hex()
        return self._home / name[:2] / name[2:4] / f"{name}{PAGE_SUFFIX}"

    def _was_of_use(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # given up by somebody else in the meantime
            os.utime(path)


def _read_fully(fd: int, buffers: list[memoryview]) -> int:
    """Fill the buffers in turn; returns the bytes read, fewer where the file ends before."""
    total = 0
    while buffers:
        count = os.preadv(fd, buffers, total)
        if count == 0:
            break
        total += count
        buffers = _behind(buffers, count)
    return total


def _write_fully(fd: int, buffers: list[memoryview]) -> None:
    total = 0
    while buffers:
        count = os.pwritev(fd, buffers, total)
        total += count
        buffers = _behind(buffers, count)


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    left = []
    for buffer in buffers:
        if count >= buffer.nbytes:
            count -= buffer.nbytes
        else:
            left.append(buffer[count:])
            count = 0
    return left
