"""`model_identity`: what two stores must agree on to read each other's pages.

A page's key covers the tokens before it, and nothing about the model. So everything else that a block's KV depends on
goes in here: the weights, all of `ModelSpec` that the forward pass may read, the context where the rotation depends on
it, and the page's layout.
"""

from __future__ import annotations

import contextlib
import os
from hashlib import sha256

import msgspec
from xxhash import xxh3_128

from slipring.runtime.tiers.store import PAGE_FORMAT
from slipring.shm.pages import PageShape
from slipring.shm.spec import ModelSpec

IMMATERIAL = frozenset({"name", "path", "files", "eos_token_ids", "bos_token_id", "sampling_defaults"})
"""Fields of `ModelSpec` that no KV depends on. Any other counts, one that is added some day too."""
_IGNORE_CONTEXT = frozenset({None, "default", "linear", "llama3", "yarn", "factors"})
"""Rope types that turn a position by the same angle however long the context is."""
_PIECE_BYTES = 16 << 10
_BUDGET_BYTES = 2 << 30


def model_identity(spec: ModelSpec, shape: PageShape, dtype: str, max_model_len: int) -> bytes:
    """32 bytes: these weights, read and laid out like this. Reads the weights' files; raises OSError.

    Up to 2 GiB of weights are hashed whole. Of more, every tensor's evenly spread pieces of 16 KiB are, 2 GiB in all,
    so that hundreds of gigabytes need not be read: two models that differ between the pieces alone (a few rows of an
    embedding, say) are one to us.
    """
    scaling = spec.rope_scaling or {}
    known = {name: getattr(spec, name) for name in spec.__struct_fields__ if name not in IMMATERIAL | {"tensors"}}
    known["tensors"] = [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in spec.tensors]
    if scaling.get("rope_type", scaling.get("type")) not in _IGNORE_CONTEXT:
        known["context"] = max(max_model_len, spec.max_position_embeddings)
    layout = (dtype, shape.num_planes, shape.block_size, shape.num_kv_heads, shape.head_bytes)
    described = msgspec.json.encode([known, layout], order="deterministic")
    return sha256(PAGE_FORMAT + described + _weights_digest(spec)).digest()


def _weights_digest(spec: ModelSpec) -> bytes:
    digest = xxh3_128()
    total = sum(tensor.nbytes for tensor in spec.tensors)
    stride = _PIECE_BYTES * max(1, -(-total // _BUDGET_BYTES))
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(path, "rb", buffering=0)) for path in spec.files]
        for tensor in spec.tensors:
            fd, end = files[tensor.file].fileno(), tensor.offset + tensor.nbytes
            for at in range(tensor.offset, end, stride):
                digest.update(os.pread(fd, min(_PIECE_BYTES, end - at), at))
    return digest.digest()
