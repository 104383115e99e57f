"""`Batch`: what one forward pass is told, in tensors. Made by the runner, read by the models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipring.workers.attention import StepAttention


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of which S rows' last ones are sampled. Decode tokens come first."""

    input_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: index of each token in its sequence."""
    attention: StepAttention
    sample_at: Tensor
    """[S] int64: tokens whose logits are wanted."""
    entry_at: NDArray[np.int64] | None = None
    """[E]: each entry's first token; None where nobody asks (on a GPU)."""
