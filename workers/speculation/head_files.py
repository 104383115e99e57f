"""A draft head's directory, as `slipring train-draft` writes it: `config.json` and `model.safetensors`; others' are
read by `published_heads.py`.

Matrices are int8 with a scale for each row, vectors half precision. The target's output matrix is not stored: its
rows of the head's vocabulary are read from the target.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.published_heads import load_published
from slipring.workers.speculation.tensor_files import (
    CONFIG,
    WEIGHTS,
    check_shape,
    check_taps,
    check_tokens,
    int8_tensors,
    write_head,
)


class HeadConfig(msgspec.Struct, frozen=True):
    """What `config.json` must say; the rest of it is for people."""

    method: str = "eagle"
    taps: tuple[int, ...] = ()


def shapes(spec: ModelSpec, taps: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Every stored weight's shape: matrices are (out, in)."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    vectors = ("input_norm", "mlp_norm", "norm") + (("embedding_norm",) if taps else ())
    return {
        "fuse": (hidden, (len(taps) or 2) * hidden),
        "qkv": (heads + 2 * spec.num_kv_heads * spec.head_dim, hidden * (2 if taps else 1)),
        "out": (hidden, heads),
        "gate_up": (2 * spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
        **({"tap_norm": (len(taps), hidden), "join": (hidden, 2 * hidden)} if taps else {}),
        **{name: (hidden,) for name in vectors},
    }


def is_matrix(name: str) -> bool:
    """A weight that is multiplied with, and stored as int8."""
    return not name.endswith("norm")


def _is_ours(path: Path) -> bool:
    if not (path / WEIGHTS).is_file():
        return False
    with safe_open(path / WEIGHTS, "pt") as file:
        return "token_ids" in file.keys()  # noqa: SIM118


def save_head(path: Path, head: EagleHead, about: dict[str, object]) -> None:
    """Write the directory `path`; `about` goes into `config.json` as well."""
    stored = {"token_ids": head.token_ids.to(torch.int32)}
    for name in shapes(head.spec, head.taps):
        weight = head.weights[name]
        stored |= int8_tensors(name, weight) if is_matrix(name) else {name: weight.detach().half()}
    write_head(path, stored, {"method": "eagle", "taps": head.taps, **about})


def load_head(path: Path, spec: ModelSpec, max_model_len: int) -> EagleHead:
    """The head, in float32, without `output` when that is the target's. Raises OSError, SafetensorError or
    msgspec.DecodeError, or ValueError when it is not a head for this model."""
    if not _is_ours(path):
        return load_published(path, spec, max_model_len)
    config = msgspec.json.decode((path / CONFIG).read_bytes(), type=HeadConfig)
    check_taps(path, config.taps, spec.num_layers)
    weights: dict[str, Tensor] = {}
    with safe_open(path / WEIGHTS, "pt") as file:
        for name, shape in shapes(spec, config.taps).items():
            if is_matrix(name):
                weights[name] = file.get_tensor(f"{name}.codes").float() * file.get_tensor(f"{name}.scale")
            else:
                weights[name] = file.get_tensor(name).float()
            check_shape(path, name, weights[name], shape)
        token_ids = file.get_tensor("token_ids").long()
    check_tokens(path, token_ids, spec.vocab_size)
    return EagleHead(spec, weights, token_ids, config.taps)
