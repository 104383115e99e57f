"""Draft heads for a tiny model that adds little to its tokens' embeddings: right often enough, and wrong often enough.

Written down from the model's weights, so no training. Imports torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from slipring.runtime.model import resolve_model
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import save_head, shapes
from slipring.workers.speculation.tensor_files import write_head

NUM_MEDUSA_HEADS = 3


def save_eagle(model: str, path: Path, loudness: float) -> str:
    """It takes the last token's embedding for the target's feature, and adds what a random layer makes of the past."""
    spec, generator = resolve_model(model), torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes(spec).items()}
    weights |= {name: torch.ones(len(weight)) for name, weight in weights.items() if weight.ndim == 1}
    weights["fuse"] = torch.cat((torch.eye(spec.hidden_size), torch.zeros(spec.hidden_size, spec.hidden_size)), 1)
    for name in ("out", "down"):
        weights[name] *= loudness
    save_head(path, EagleHead(spec, weights, torch.arange(3, spec.vocab_size - 2)), {})
    return str(path)


def save_medusa(model: str, path: Path) -> str:
    """Each head is fitted to what would follow if a token told the next."""
    weights = load_file(Path(model) / "model.safetensors")
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    hidden = embedding * (embedding.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    following = (hidden @ output.T).argmax(1)
    tensors: dict[str, Tensor] = {}
    ahead = following
    for number in range(NUM_MEDUSA_HEADS):
        ahead = following[ahead]
        fitted = torch.linalg.lstsq(hidden, F.one_hot(ahead, len(output)).float()).solution
        size = hidden.shape[1]
        tensors[f"medusa_head.{number}.0.linear.weight"] = torch.zeros(size, size)
        tensors[f"medusa_head.{number}.0.linear.bias"] = torch.zeros(size)
        tensors[f"medusa_head.{number}.1.weight"] = fitted.T.contiguous() * 10
    write_head(path, tensors, {})
    return str(path)
