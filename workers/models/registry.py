"""Architecture name (`ModelSpec.architecture`) -> model class."""

from __future__ import annotations

from slipring.shm.spec import ModelSpec
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.models.qwen import Qwen2, Qwen3

MODELS: dict[str, type[Llama]] = {"llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3}


def build_model(spec: ModelSpec, weights: Weights, max_model_len: int) -> Llama:
    """Load the model of `spec`. Raises ValueError for an unknown architecture, WeightError for a bad checkpoint."""
    try:
        family = MODELS[spec.architecture]
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ValueError(f"architecture {spec.architecture!r} is not supported (supported: {known})") from None
    return family(spec, weights, max_model_len)
