"""`PageStore`: what a slow tier is made of. Blocking calls, made from the threads of `jobs.py`, any number at once.

A store may lose a page, and may be asked for one it never had; it must never give a page that is not the one stored
under the key. Every store therefore seals its pages (`seal`, `unseal`): a header with the key, the identity, and a
digest of the content. It is there against disks and networks that err, not against people, for whoever may write a page
could seal it as well. So it is a fast one: XXH3 with 128 bits, 14 GB/s on a core that does 1.2 of SHA-256.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from xxhash import xxh3_128

from slipring.scheduler.offload.key import OffloadKey

PAGE_FORMAT = b"SLIPKV\x00\x02"
"""The one version of header and page (`shm/pages.py`). A header begins with it, and it is part of a model's identity,
so that versions that share a store do not meet there."""
_HEADER = struct.Struct("<8sQ32s40s16s24x")
HEADER_BYTES = _HEADER.size
"""128."""


class PageMissingError(Exception):
    """The store has no such page."""


class PageCorruptError(Exception):
    """What lies under the key is not what was stored there; it must not be used, and has been removed."""


class PageStore(Protocol):
    name: str
    """For metrics and messages."""
    read_only: bool
    """`write` never keeps anything."""
    keys_per_lookup: int
    """So many keys in one call of `count_prefix`; several calls are made at once, from several threads."""

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        """How many of the leading keys it has, as far as can be told without reading them. Raises OSError."""
        ...

    def read(self, key: OffloadKey, into: memoryview) -> None:
        """Fill `into`, page_bytes long. Raises PageMissingError, PageCorruptError or OSError; then it holds junk."""
        ...

    def write(self, key: OffloadKey, page: memoryview) -> bool:
        """Keep a page; False when it was not worth it (no room below the quota). Raises OSError."""
        ...

    def close(self) -> None: ...


def count_while(contains: Callable[[OffloadKey], bool], keys: Sequence[OffloadKey]) -> int:
    """`count_prefix` of a store that can only be asked for one key at a time."""
    return sum(1 for _ in takewhile(contains, keys))


def seal(key: OffloadKey, identity: bytes, page: memoryview) -> bytes:
    """The header of a page. `identity`: 32 bytes, see `identity.py`."""
    return _HEADER.pack(PAGE_FORMAT, page.nbytes, identity, key, _digest(key, identity, page))


def unseal(header: bytes, key: OffloadKey, identity: bytes, page: memoryview) -> None:
    """Raises PageCorruptError unless the header is that of this very page."""
    if len(header) != HEADER_BYTES:
        raise PageCorruptError("the header is cut off")
    magic, nbytes, found_identity, found_key, digest = _HEADER.unpack(header)
    if magic != PAGE_FORMAT:
        raise PageCorruptError("no page of this version")
    if found_identity != identity or nbytes != page.nbytes:
        raise PageCorruptError("a page of another model or layout")
    if found_key[: len(key)] != key or digest != _digest(key, identity, page):
        raise PageCorruptError("the content is not what was stored")


def _digest(key: OffloadKey, identity: bytes, page: memoryview) -> bytes:
    digest = xxh3_128(key + identity)
    digest.update(page)
    return digest.digest()
