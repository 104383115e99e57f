"""Reads the header of a GGUF file: its metadata and its tensor index. Owns the file format and nothing else.

Layout (version 2 and 3, little-endian), from the format's specification in ggml's `docs/gguf.md`:

    "GGUF" | u32 version | u64 tensor count | u64 metadata count
    metadata: (string key | u32 type | value) ...        a string is u64 length + bytes
    tensors:  (string name | u32 dims | u64 dim ... | u32 type | u64 offset) ...
    padding to `general.alignment`, then the tensors' data, whose start the offsets count from

Invariants: no count or length is believed before it is checked against the bytes that are left, so whatever the file
holds, reading it ends in a `GgufFile` or a `GgufError`, in time and memory bounded by the file's size and the limits
below. Weights are never touched. Strings of an array are found but not decoded until somebody asks, which is what
makes opening a file with 49k tokens and 48k merges take tens of milliseconds.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from slipring.runtime.architectures import ModelError
from slipring.shm.spec import TensorSpec

MAX_ARRAY = 1 << 24
"""Most elements of one metadata array: far above any vocabulary, low enough to fit in memory."""
MAX_STRING = 1 << 26
MAX_NESTING = 4
"""Deepest nesting of arrays; the format sets no limit, and no file in the field goes beyond one."""
MAX_DIMS = 4

# name: (number, elements in a block, bytes of a block), spelt as `gguf.GGMLQuantizationType` spells them.
_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q8_1": (9, 32, 40), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110), "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8), "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18),
}  # fmt: skip
GGML_TYPES = {number: (name, block, size) for name, (number, block, size) in _TYPES.items()}
"""Number in the file: (name, elements in a block, bytes of a block)."""

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


class GgufError(ModelError):
    """The file is not a GGUF that can be read; the message is a sentence that names the file and the problem."""


class StringArray(Sequence[str]):
    """The strings of a metadata array, decoded on access (invalid UTF-8 becomes U+FFFD)."""

    def __init__(self, raw: bytes, ends: Sequence[int]) -> None:
        self._raw = raw
        self._ends = ends
        """Where each string ends in `raw`; it begins 8 bytes (its length) after the one before it."""

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return self._raw[start + 8 : self._ends[index]].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        raw, start = self._raw, 8
        for end in self._ends:
            yield raw[start:end].decode("utf-8", "replace")
            start = end + 8


class GgufFile:
    """The parsed header. `metadata` maps keys to int, float, bool, str, numpy arrays, `StringArray` or lists."""

    def __init__(self, path: str, version: int, metadata: dict[str, Any], tensors: tuple[TensorSpec, ...]) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value at `key`, or `default` if absent. Raises GgufError when it is of another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(f"{self.path}: metadata {key!r} has an unexpected type ({type(value).__name__}).")
        return value

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value at `key`. Raises GgufError when it is absent or of another type."""
        value = self.get(key, kind)
        if value is None:
            raise GgufError(f"{self.path}: metadata {key!r} is missing.")
        return value


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Parses the header of `path`. Raises GgufError for anything but a sound file, OSError if it cannot be opened."""
    path = os.fspath(path)
    # O_NONBLOCK: opening a pipe must not wait for somebody to write into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise GgufError(f"{path} is not a regular file.")
        if info.st_size < 24:
            raise GgufError(f"{path} is too short to be a GGUF file ({info.st_size} bytes).")
        with mmap.mmap(descriptor, info.st_size, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).parse()
    finally:
        os.close(descriptor)


class _Header:
    """One pass over the mapped file; `pos` is the next byte to read."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.pos = 0

    def parse(self) -> GgufFile:
        version = self._version()
        num_tensors, num_metadata = self._u64(), self._u64()
        metadata = self._metadata(num_metadata)
        tensors = self._tensors(num_tensors, metadata.get("general.alignment", 32))
        return GgufFile(self.path, version, metadata, tensors)

    def fail(self, problem: str) -> GgufError:
        return GgufError(f"{self.path}: {problem}")

    def _version(self) -> int:
        if self.data[:4] != b"GGUF":
            raise self.fail("not a GGUF file (it does not begin with 'GGUF').")
        version = _u32(self.data, 4)[0]
        self.pos = 8
        if version in (2 << 24, 3 << 24):
            raise self.fail("a big-endian GGUF; only little-endian files can be read.")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not supported (2 and 3 are).")
        return version

    def _take(self, nbytes: int) -> int:
        """Claims the next `nbytes` and returns where they begin."""
        start = self.pos
        if nbytes > self.size - start:
            raise self.fail(f"truncated or damaged: {nbytes} bytes wanted at {start}, the file has {self.size}.")
        self.pos = start + nbytes
        return start

    def _u32(self) -> int:
        return _u32(self.data, self._take(4))[0]

    def _u64(self) -> int:
        return _u64(self.data, self._take(8))[0]

    def _count(self, count: int, least: int, what: str) -> int:
        """Accepts `count` things of at least `least` bytes each only if the rest of the file can hold them."""
        if count * least > self.size - self.pos:
            raise self.fail(f"truncated or damaged: it claims {count} {what}, more than its bytes can hold.")
        return count

    def _string(self, errors: str = "replace") -> str:
        length = self._u64()
        if length > MAX_STRING:
            raise self.fail(f"damaged: a string of {length} bytes.")
        start = self._take(length)
        return self.data[start : self.pos].decode("utf-8", errors)

    def _name(self, what: str) -> str:
        try:
            return self._string("strict")
        except UnicodeDecodeError:
            raise self.fail(f"damaged: a {what} is not valid UTF-8.") from None

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self._count(count, 13, "metadata entries")):
            key = self._name("metadata key")
            if key in metadata:
                raise self.fail(f"damaged: metadata {key!r} appears twice.")
            metadata[key] = self._value(self._u32(), 0)
        return metadata

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        dtype = self._scalar(kind)
        return np.frombuffer(self.data, dtype, 1, self._take(dtype.itemsize))[0].item()

    def _scalar(self, kind: int) -> np.dtype:
        if kind not in _SCALARS:
            raise self.fail(f"damaged: metadata of unknown type {kind}.")
        return np.dtype(_SCALARS[kind])

    def _array(self, depth: int) -> Any:
        kind, count = self._u32(), self._u64()
        if count > MAX_ARRAY or depth > MAX_NESTING:
            raise self.fail(f"damaged: a metadata array of {count} elements at depth {depth}.")
        if kind == _STRING:
            return self._strings(self._count(count, 8, "strings"))
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(self._count(count, 12, "arrays"))]
        dtype = self._scalar(kind)
        start = self._take(count * dtype.itemsize)
        return np.frombuffer(self.data[start : self.pos], dtype)

    def _strings(self, count: int) -> StringArray:
        start, pos, ends = self.pos, 0, []
        # A copy of what is left would be the whole file, so lengths are read from the map, then the section is copied.
        data, size = self.data, self.size - 8
        for _ in range(count):
            if start + pos > size:
                raise self.fail("truncated or damaged: a string of an array lies beyond the end of the file.")
            pos += 8 + _u64(data, start + pos)[0]
            ends.append(pos)
        self._take(pos)
        return StringArray(data[start : start + pos], array("q", ends))

    def _tensors(self, count: int, alignment: Any) -> tuple[TensorSpec, ...]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self.fail(f"damaged: general.alignment is {alignment!r}, which is not a multiple of 8.")
        entries = [self._tensor() for _ in range(self._count(count, 24, "tensors"))]
        data_start = -(-self.pos // alignment) * alignment
        tensors = tuple(self._place(entry, data_start, alignment) for entry in entries)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise self.fail("damaged: two tensors have the same name.")
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("tensor name")
        num_dims = self._u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"damaged: tensor {name!r} has {num_dims} dimensions.")
        shape = tuple(self._u64() for _ in range(num_dims))
        return name, shape[::-1], self._u32(), self._u64()  # stored columns first

    def _place(self, entry: tuple[str, tuple[int, ...], int, int], data_start: int, alignment: int) -> TensorSpec:
        name, shape, kind, offset = entry
        if kind not in GGML_TYPES:
            raise self.fail(f"tensor {name!r} has the unknown type {kind}; a newer Slipring may read it.")
        dtype, block, size = GGML_TYPES[kind]
        if shape[-1] % block or offset % alignment:
            raise self.fail(f"damaged: tensor {name!r} ({dtype}, shape {shape}, offset {offset}) is not aligned.")
        nbytes = math.prod(shape) // block * size
        if data_start + offset + nbytes > self.size:
            raise self.fail(
                f"truncated: tensor {name!r} ends at byte {data_start + offset + nbytes}, "
                f"the file has {self.size}. Download it again."
            )
        return TensorSpec(name, 0, data_start + offset, nbytes, dtype, shape)
