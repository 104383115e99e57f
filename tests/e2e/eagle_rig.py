"""An EAGLE head of random weights, for tests that want drafts which are mostly wrong. Imports torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from slipring.runtime.model import resolve_model
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import save_head, shapes


def random_head(model: str, directory: Path) -> str:
    """Writes one for the model; returns a speculative config that names it."""
    spec, path, generator = resolve_model(model), directory / "head", torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes(spec).items()}
    save_head(path, EagleHead(spec, weights, torch.arange(3, spec.vocab_size - 2)), {})
    return json.dumps({"method": "eagle", "model": str(path), "num_speculative_tokens": 3})
