"""The keys of the prefix cache: a chain of SHA-256 digests, one for each full block.

A block's hash covers its parent's hash and its own token ids at fixed width, so equal hashes mean equal whole
prefixes and [1, 23] never looks like [12, 3]. What else must keep prompts apart (a salt, an adapter) goes into the
chain's root, each part tagged with its kind and length.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_SEED = b"slipring.prefix.v1"


def chain_root(cache_salt: str | None = None, adapter: str | None = None) -> bytes:
    """The parent of a prompt's first block."""
    digest = hashlib.sha256(_SEED)
    for tag, value in ((b"salt", cache_salt), (b"adapter", adapter)):
        if value is not None:
            data = value.encode("utf-8", "surrogatepass")
            digest.update(tag + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_chain(parent: bytes, token_ids: NDArray[np.int32], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which begin right after the block whose hash is `parent`."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    step = block_size * 4
    hashes = []
    for at in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[at : at + step]).digest()
        hashes.append(parent)
    return hashes
