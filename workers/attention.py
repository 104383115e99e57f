"""`StepAttention`: what stands between a layer's projections. Turn, store, attend, in the form the device wants.

A model hands over a layer's heads and gets the mixed values back; whether they were attended to in groups by torch
(`PlannedAttention`) or by paged kernels that read device row state (`cuda/attention.py`) does not show in a model.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from slipring.kernels.paged_attention import AttentionPlan, paged_attention
from slipring.kernels.rope import rope
from slipring.kernels.store_kv import store_kv

Pools = tuple[Tensor, Tensor]
"""One layer's keys and values, [num_blocks, block_size, KVH, D] each."""


class StepAttention(Protocol):
    """One step's tokens, for every layer in turn."""

    def layer(self, heads: Tensor, value: Tensor, cos_sin: Tensor, pools: Pools, scale: float) -> Tensor:
        """heads [T, H + KVH, D]: q and k, not turned yet (may be overwritten); value [T, KVH, D] -> [T, H * D].

        cos_sin [P, 2, D] from `build_cos_sin`. This step's keys and values are in the pools afterwards.
        """
        ...


class PlannedAttention:
    """On the CPU: the plan holds all that no layer changes, and the turns are gathered once for a step."""

    def __init__(self, plan: AttentionPlan, positions: Tensor) -> None:
        self._plan = plan
        self._positions = positions
        self._turn: tuple[Tensor, ...] = ()

    def layer(self, heads: Tensor, value: Tensor, cos_sin: Tensor, pools: Pools, scale: float) -> Tensor:
        if not self._turn:
            self._turn = cos_sin.index_select(0, self._positions).unsqueeze(2).unbind(1)
        cos, sin = self._turn
        turned = rope(heads, cos, sin)
        num_heads = heads.shape[1] - value.shape[1]
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        store_kv(key, value, *pools, self._plan.slot_mapping)
        return paged_attention(query, key, value, *pools, self._plan, scale)
