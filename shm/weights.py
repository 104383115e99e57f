"""One model's weights in a segment that outlives workers: filled by the first, mapped read-only by all.

    0      ┌───────────────────────────────────────────────────────────────┐
           │ magic u64 │ complete u64 │ index_at u64 │ index_bytes u64     │  written by the filler, `complete` last
    4096   ├───────────────────────────────────────────────────────────────┤
           │ a tensor's bytes, from a page's beginning │ the next │ ...    │  written by the filler
    index  ├───────────────────────────────────────────────────────────────┤
           │ msgpack: key → `Kept`                                         │
           └───────────────────────────────────────────────────────────────┘

The engine makes the descriptor (a memfd) and keeps it; workers inherit it. Who fills holds a record lock, which the
kernel takes back when the filler dies, wherever it was: without its completion word the segment is worth nothing, and
the next worker fills it again. Nothing is written after completion.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import msgspec

_MAGIC = 0x534C4950_57475453  # "SLIPWGTS"
_WORD = 8
_COMPLETE_AT = _WORD
_HEADER_BYTES = 4 * _WORD
_MOST_AT_ONCE = 1 << 30
"""Linux writes at most 2 GiB in one call."""
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in the segment."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    layout: bytes = b""
    """Of a packed weight, the library's own description of it; empty: row-major."""


class WeightSegment:
    """The engine's side: owns the descriptor. `renew` makes an empty one for workers that start from now on."""

    def __init__(self) -> None:
        self.fd = _memfd()

    def renew(self) -> None:
        self.close()
        self.fd = _memfd()

    def close(self) -> None:
        """Idempotent. Workers that have mapped it keep what they have."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class WeightFile:
    """A worker's side."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = mmap.PAGESIZE
        self._kept: dict[str, Kept] = {}

    @property
    def is_complete(self) -> bool:
        # SYNC: header, index and every tensor are written before the completion word
        header = os.pread(self._fd, _HEADER_BYTES, 0)
        return len(header) == _HEADER_BYTES and _words(header)[:2] == (_MAGIC, 1)

    def try_lock(self) -> bool:
        """Become the one who fills. The lock ends with `finish`, or with this process."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def begin(self) -> None:
        """Drop what somebody has left unfinished. The caller holds the lock."""
        os.ftruncate(self._fd, 0)
        self._end, self._kept = mmap.PAGESIZE, {}

    def append(self, key: str, data: memoryview, dtype: str, shape: tuple[int, ...], layout: bytes = b"") -> Kept:
        """Write one tensor. Raises OSError when memory is short."""
        kept = self._kept[key] = Kept(self._end, data.nbytes, dtype, shape, layout)
        for at in range(0, data.nbytes, _MOST_AT_ONCE):
            self._write(data[at : at + _MOST_AT_ONCE], self._end + at)
        self._end = -(-(self._end + data.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        return kept

    def finish(self) -> None:
        """Every tensor is there."""
        index = msgspec.msgpack.encode(self._kept)
        self._write(memoryview(index), self._end)
        header = (_MAGIC, 0, self._end, len(index))
        os.pwrite(self._fd, b"".join(word.to_bytes(_WORD, "little") for word in header), 0)
        # SYNC: header, index and every tensor are written before the completion word
        os.pwrite(self._fd, (1).to_bytes(_WORD, "little"), _COMPLETE_AT)
        self.unlock()

    def index(self) -> dict[str, Kept]:
        """Of a complete segment."""
        _, _, at, nbytes = _words(os.pread(self._fd, _HEADER_BYTES, 0))
        return msgspec.msgpack.decode(os.pread(self._fd, nbytes, at), type=dict[str, Kept])

    def map(self, kept: Kept) -> ctypes.Array[ctypes.c_ubyte]:
        """The tensor's bytes, for as long as this process lives. Read-only, whatever the buffer says: a stray write is
        a SIGSEGV here, never another worker's wrong answer. Raises OSError.

        Python's own mappings keep a descriptor each, and a model may have more weights than a process may have files.
        """
        nbytes = max(1, kept.nbytes)
        address = _mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, self._fd, kept.offset)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"could not map {nbytes} bytes of weights")
        return (ctypes.c_ubyte * nbytes).from_address(address)

    def _write(self, data: memoryview, at: int) -> None:
        while data.nbytes:
            written = os.pwrite(self._fd, data, at)
            data, at = data[written:], at + written


def _words(header: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(header[at : at + _WORD], "little") for at in range(0, len(header), _WORD))


def _memfd() -> int:
    return os.memfd_create("slipring-weights", os.MFD_CLOEXEC)
