"""An EAGLE head (Li et al. 2024): one decoder layer that guesses the target's next hidden state from its last one.

Input at position p is the target's normed hidden state there and the embedding of the token at p + 1; the output
stands for the normed hidden state at p + 1, so the target's own output matrix, cut to the head's vocabulary, turns it
into scores of the token at p + 2. Fed with its own output, it guesses further. `token_ids` are the vocabulary: the
tokens that the model writes most. Weights are stored as int8 with a scale for each row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipring.kernels.rmsnorm import rmsnorm
from slipring.shm.spec import ModelSpec

Attend = Callable[[Tensor, Tensor], Tensor]
"""(heads of q and k [T, H + KVH, D], not turned yet, v [T, KVH, D]) -> [T, H * D]"""
MATRICES = ("fuse", "qkv", "out", "gate_up", "down")
VECTORS = ("input_norm", "mlp_norm", "norm")


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight's shape: matrices are (out, in)."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    return {
        "fuse": (hidden, 2 * hidden),
        "qkv": (heads + 2 * spec.num_kv_heads * spec.head_dim, hidden),
        "out": (hidden, heads),
        "gate_up": (2 * spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
    } | {name: (hidden,) for name in VECTORS}


def forward(
    weights: dict[str, Tensor],
    linear: Callable[[Tensor, Tensor], Tensor],
    spec: ModelSpec,
    embedded: Tensor,
    hidden: Tensor,
    attend: Attend,
) -> Tensor:
    """embedded, hidden [T, hidden] -> guessed hidden states [T, hidden]."""
    x = linear(torch.cat((embedded, hidden), 1), weights["fuse"])
    normed, _ = rmsnorm(x, weights["input_norm"], spec.rms_norm_eps)
    heads = linear(normed, weights["qkv"]).view(len(x), -1, spec.head_dim)
    mixed = attend(heads[:, : -spec.num_kv_heads], heads[:, -spec.num_kv_heads :])
    x = x + linear(mixed, weights["out"])
    normed, _ = rmsnorm(x, weights["mlp_norm"], spec.rms_norm_eps)
    gate, up = linear(normed, weights["gate_up"]).chunk(2, 1)
    x = x + linear(F.silu(gate) * up, weights["down"])
    normed, _ = rmsnorm(x, weights["norm"], spec.rms_norm_eps)
    return normed


def save_head(path: Path, weights: dict[str, Tensor], token_ids: Tensor, about: dict[str, object]) -> None:
    """Write `config.json` and `model.safetensors` into the directory `path`."""
    stored = {"token_ids": token_ids.to(torch.int32)} | {name: weights[name].detach().half() for name in VECTORS}
    for name in MATRICES:
        wide = weights[name].detach().float()
        scale = wide.abs().amax(1, keepdim=True) / 127
        stored[f"{name}.codes"] = (wide / scale).round().to(torch.int8)
        stored[f"{name}.scale"] = scale
    path.mkdir(parents=True, exist_ok=True)
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(about, indent=1) + "\n")


def load_head(path: Path, spec: ModelSpec) -> tuple[dict[str, Tensor], Tensor]:
    """(weights in float32, token_ids [n] int64). Raises ValueError when it is not a head for this model."""
    weights = {}
    with safe_open(path / "model.safetensors", "pt") as file:
        for name, shape in shapes(spec).items():
            if name in VECTORS:
                weights[name] = file.get_tensor(name).float()
            else:
                weights[name] = file.get_tensor(f"{name}.codes").float() * file.get_tensor(f"{name}.scale")
            if weights[name].shape != shape:
                found = list(weights[name].shape)
                raise ValueError(f"{path}: {name} is {found}, this model needs {list(shape)}: made for another model?")
        token_ids = file.get_tensor("token_ids").long()
    return weights, token_ids
