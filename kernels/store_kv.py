"""Writing a step's keys and values into the paged pool."""

from __future__ import annotations

from torch import Tensor


def store_kv_ref(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor) -> None:
    """key, value [T, KVH, D] -> pools [num_blocks, block_size, KVH, D] at slot_mapping [T] (int64).

    A slot is block * block_size + offset in the block. Slots of one call are distinct.
    """
    shape = (-1, *key_pool.shape[2:])
    key_pool.view(shape).index_copy_(0, slot_mapping, key)
    value_pool.view(shape).index_copy_(0, slot_mapping, value)


def store_kv(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor) -> None:
    """As `store_kv_ref`, for the CPU; a GPU's steps go by `rope_store_kv.py`."""
    store_kv_ref(key, value, key_pool, value_pool, slot_mapping)
