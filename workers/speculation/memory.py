"""Memory that drafts take beside the model, known before anything of it is loaded: the KV pool leaves it room."""

from __future__ import annotations

from math import prod
from pathlib import Path

from msgspec.structs import replace

from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.workers.kv_cache import DTYPES, DraftMemory, block_bytes


def draft_memory(config: WorkerConfig) -> DraftMemory:
    """Weights of heads are at most what this says; a head's file holds at least one byte for each number."""
    spec, dtype = config.speculation, DTYPES[config.dtype]
    if spec is None or config.max_draft == 0:
        return DraftMemory()
    if spec.draft is not None:
        each = block_bytes(spec.draft, config.block_size, dtype)
        return DraftMemory(each, _num_weights(spec.draft) * dtype.itemsize)
    if spec.method not in ("eagle", "medusa"):
        return DraftMemory()
    files = [path for path in Path(spec.model or "").glob("*") if path.suffix in (".safetensors", ".bin", ".pt")]
    weights = sum(path.stat().st_size for path in files) * (dtype.itemsize + 1)  # beside its int8 codes
    layer = block_bytes(replace(config.model, num_layers=1), config.block_size, dtype)
    return DraftMemory(layer if spec.method == "eagle" else 0, weights)


def _num_weights(spec: ModelSpec) -> int:
    packed = 32 // spec.quantization.bits if spec.quantization else 1
    return sum(prod(tensor.shape) * (packed if tensor.dtype == "I32" else 1) for tensor in spec.tensors)
