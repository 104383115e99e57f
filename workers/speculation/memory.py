"""Memory that drafts take beside the model, known before anything of it is loaded: the KV pool leaves it room."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from msgspec.structs import replace

from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.workers.kv_cache import DTYPES, DraftMemory, block_bytes
from slipring.workers.speculation import medusa_head, published_heads
from slipring.workers.speculation.backlog import backlog_size
from slipring.workers.speculation.tensor_files import first_file, read_shapes, refusing


def draft_memory(config: WorkerConfig) -> DraftMemory:
    """Raises StartRefused when a head's files cannot be read."""
    spec, dtype = config.speculation, DTYPES[config.dtype]
    if spec is None or config.max_draft == 0:
        return DraftMemory()
    if spec.draft is not None:
        each = block_bytes(spec.draft, config.block_size, dtype)
        return DraftMemory(each, _num_weights(spec.draft) * dtype.itemsize)
    if spec.method == "eagle":
        layer = block_bytes(replace(config.model, num_layers=1), config.block_size, dtype)
        shapes = _shapes(config, published_heads.FILES)
        waiting = config.num_rows * backlog_size(config.block_size) * _state_width(config, shapes)
        return DraftMemory(layer, _eagle_weights(config, dtype, shapes) + waiting * dtype.itemsize)
    return DraftMemory(fixed=_medusa_weights(config, dtype)) if spec.method == "medusa" else DraftMemory()


def _state_width(config: WorkerConfig, shapes: dict[str, tuple[int, ...]]) -> int:
    """Of what waits to be entered: the last hidden state, or the taps of an EAGLE-3 head, which it fuses alone."""
    reads = next((shape[-1] for name, shape in shapes.items() if name in ("fuse.codes", "fc.weight")), 0)
    hidden = config.model.hidden_size
    return reads if published_heads.is_eagle3(shapes, hidden) else hidden


def _eagle_weights(config: WorkerConfig, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes; each matrix is held twice, as int8 codes too."""
    if "lm_head.weight" not in shapes:
        shapes["output"] = _rows_of_target(config, shapes)
    return sum(prod(shape) * (dtype.itemsize + (len(shape) == 2)) for shape in shapes.values())


def _medusa_weights(config: WorkerConfig, dtype: torch.dtype) -> int:
    shapes = _shapes(config, medusa_head.FILES)
    # The last block of a published head has its output matrix, over the whole vocabulary.
    if not any(shape == (config.model.vocab_size, config.model.hidden_size) for shape in shapes.values()):
        shapes["output"] = _rows_of_target(config, shapes)
    return sum(prod(shape) for shape in shapes.values()) * dtype.itemsize


def _shapes(config: WorkerConfig, files: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    assert config.speculation is not None
    with refusing():
        shapes = read_shapes(first_file(Path(config.speculation.model or ""), files))
    return {name: shape for name, shape in shapes.items() if name not in published_heads.NOT_READ}


def _rows_of_target(config: WorkerConfig, shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """A head without an output matrix takes the target's rows of its vocabulary along."""
    num_rows = shapes["token_ids"][0] if "token_ids" in shapes else config.model.vocab_size
    return num_rows, config.model.hidden_size


def _num_weights(spec: ModelSpec) -> int:
    packed = 32 // spec.quantization.bits if spec.quantization else 1
    once = sum(prod(tensor.shape) * (packed if tensor.dtype == "I32" else 1) for tensor in spec.tensors)
    # The output matrix is packed, the embedding is not: a tied one is held in both forms.
    return once + spec.vocab_size * spec.hidden_size * spec.tie_word_embeddings
