"""`OffloadKey`: the name of one block's KV outside the device, as packed bytes.

The block's hash, which covers its whole prefix (`scheduler.prefix_cache`), and the KV group it belongs to, 4 bytes
big-endian. Plain bytes rather than a tuple: tens of thousands of them live as dictionary keys, and the garbage
collector does not look at bytes.
"""

from __future__ import annotations

from typing import NewType

from slipring.scheduler.block_pool import BlockHash

OffloadKey = NewType("OffloadKey", bytes)

_GROUP_BYTES = 4


def offload_key(block_hash: BlockHash, group: int = 0) -> OffloadKey:
    return OffloadKey(block_hash + group.to_bytes(_GROUP_BYTES, "big"))


def hash_of(key: OffloadKey) -> BlockHash:
    return key[:-_GROUP_BYTES]


def group_of(key: OffloadKey) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
