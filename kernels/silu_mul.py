"""The gated activation of the Llama family's MLP: `silu(gate) * up` (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], the gate's columns first -> [T, I], contiguous, same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """As `silu_mul_ref`. Dispatch point: every device runs the reference so far."""
    return silu_mul_ref(gate_up)
