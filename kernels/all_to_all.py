"""All-to-all for experts that are spread over ranks: `dispatch` brings tokens to experts, `combine` brings sums back.

Experts are dealt evenly: rank r holds [r * E, (r + 1) * E). Every rank has the same number T of tokens (padding has
expert -1). Ranks pull, and every row has a fixed place, so nothing is counted, sorted or added atomically, shapes never
change and results do not depend on timing:

    dispatch  token t of rank s arrives in row s * T + t, if any of its experts is here; its experts as local numbers
              (-1: elsewhere) and its weights arrive in any case. Rows that nobody here wants keep what they held.
    combine   row s * T + t holds the weighted sum over the experts of this rank; rank s adds up, in rank order and
              fp32, the rows of those ranks that hold one of the token's experts.

A lane (see `comm.py`) carries the tokens p, p + P, p + 2P, ... for P programs. Of its half, dispatch uses
`| row | experts int32[KP] | weights fp32[KP] |` a token; combine uses one row for each rank and token. A row
is padded to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipring.kernels.comm import Communicator, copy, meet, place
from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


@triton.jit(do_not_specialize=["num_tokens", "rank", "limit"])
def dispatch_kernel(
    X, EXPERTS, WEIGHTS, ROWS, LOCAL, OUT_WEIGHTS, PEERS, EPOCHS, POISON,
    num_tokens, width, row_bytes, slot_bytes, lane_bytes, num_local, rank, limit,
    K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a lane. KP is K rounded up to a power of two, at least 4: 16 bytes."""
    if tl.load(POISON) != 0:
        return
    lane = tl.program_id(0)
    epoch = tl.load(EPOCHS + lane) + 1
    num_slots = tl.cdiv(num_tokens - lane, tl.num_programs(0))
    k = tl.arange(0, KP)
    weights_at = row_bytes + 4 * KP
    for slot in range(num_slots):
        token = lane + slot * tl.num_programs(0)
        experts = place(PEERS, rank, lane, epoch, lane_bytes, slot * slot_bytes + row_bytes, EXPERTS, LANES)
        weights = place(PEERS, rank, lane, epoch, lane_bytes, slot * slot_bytes + weights_at, WEIGHTS, LANES)
        tl.store(experts + k, tl.load(EXPERTS + token * K + k, k < K), k < K)
        tl.store(weights + k, tl.load(WEIGHTS + token * K + k, k < K), k < K)
        row = place(PEERS, rank, lane, epoch, lane_bytes, slot * slot_bytes, X, LANES)
        copy(row, X + token.to(tl.int64) * width, width, False, BLOCK)
    if meet(PEERS, POISON, rank, lane, 2 * epoch - 1, limit, WORLD) == 1:
        for peer in range(WORLD):
            for slot in range(num_slots):
                token = lane + slot * tl.num_programs(0)
                experts = place(PEERS, peer, lane, epoch, lane_bytes, slot * slot_bytes + row_bytes, EXPERTS, LANES)
                weights = place(PEERS, peer, lane, epoch, lane_bytes, slot * slot_bytes + weights_at, WEIGHTS, LANES)
                local = tl.load(experts + k, k < K, -1, volatile=True) - rank * num_local
                here = (local >= 0) & (local < num_local) & (k < K)
                to = (peer * num_tokens + token).to(tl.int64)
                tl.store(LOCAL + to * K + k, tl.where(here, local, -1), k < K)
                tl.store(OUT_WEIGHTS + to * K + k, tl.load(weights + k, k < K, volatile=True), k < K)
                if tl.max(here.to(tl.int32), 0) == 1:
                    row = place(PEERS, peer, lane, epoch, lane_bytes, slot * slot_bytes, X, LANES)
                    copy(ROWS + to * width, row, width, True, BLOCK)
    tl.store(EPOCHS + lane, epoch)


@triton.jit(do_not_specialize=["num_tokens", "rank", "limit"])
def combine_kernel(
    ROWS, LOCAL, EXPERTS, OUT, PEERS, EPOCHS, POISON,
    num_tokens, width, row_bytes, lane_bytes, num_local, rank, limit,
    K: tl.constexpr, KP: tl.constexpr, LANES: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a lane. The lane's row for (rank s, its n-th token) is n * WORLD + s."""
    if tl.load(POISON) != 0:
        return
    lane = tl.program_id(0)
    epoch = tl.load(EPOCHS + lane) + 1
    num_slots = tl.cdiv(num_tokens - lane, tl.num_programs(0))
    k = tl.arange(0, KP)
    for slot in range(num_slots):
        token = lane + slot * tl.num_programs(0)
        for peer in range(WORLD):
            source = (peer * num_tokens + token).to(tl.int64)
            if tl.max(tl.load(LOCAL + source * K + k, k < K, -1), 0) >= 0:
                row = place(PEERS, rank, lane, epoch, lane_bytes, (slot * WORLD + peer) * row_bytes, ROWS, LANES)
                copy(row, ROWS + source * width, width, False, BLOCK)
    if meet(PEERS, POISON, rank, lane, 2 * epoch - 1, limit, WORLD) == 1:
        for slot in range(num_slots):
            token = lane + slot * tl.num_programs(0)
            experts = tl.load(EXPERTS + token * K + k, k < K, -1)
            for begin in range(0, width, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                total = tl.zeros([BLOCK], tl.float32)
                for peer in tl.static_range(WORLD):
                    there = (experts >= peer * num_local) & (experts < (peer + 1) * num_local)
                    wanted = tl.max(there.to(tl.int32), 0) == 1
                    row = place(PEERS, peer, lane, epoch, lane_bytes, (slot * WORLD + rank) * row_bytes, ROWS, LANES)
                    total += tl.load(row + at, (at < width) & wanted, 0.0, volatile=True).to(tl.float32)
                tl.store(OUT + token.to(tl.int64) * width + at, total.to(OUT.dtype.element_ty), at < width)
    tl.store(EPOCHS + lane, epoch)


def dispatch_ref(
    inputs: Sequence[Tensor], experts: Sequence[Tensor], weights: Sequence[Tensor], rank: int, num_local: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of all ranks' x [T, H], experts int32 [T, K] and weights [T, K], what `rank` gets. Unwanted rows are zeros.

    Returns (rows [world * T, H], local experts int32 [world * T, K], weights fp32 [world * T, K]).
    """
    chosen = torch.cat(list(experts)) - rank * num_local
    local = torch.where((chosen >= 0) & (chosen < num_local), chosen, -1).int()
    wanted = (local >= 0).any(-1, keepdim=True)
    return torch.cat(list(inputs)) * wanted, local, torch.cat(list(weights)).float()


def combine_ref(rows: Sequence[Tensor], experts: Tensor, rank: int, num_local: int) -> Tensor:
    """Of all ranks' rows [world * T, H], the sums for `rank`'s tokens [T, H], whose experts are given [T, K]."""
    num_tokens = experts.shape[0]
    total = torch.zeros(num_tokens, rows[0].shape[1])
    for peer, theirs in enumerate(rows):
        there = ((experts >= peer * num_local) & (experts < (peer + 1) * num_local)).any(-1, keepdim=True)
        total += torch.where(there, theirs[rank * num_tokens : (rank + 1) * num_tokens].float(), 0.0)
    return total.to(rows[0].dtype)


register("comm.all_to_all", any={"BLOCK": 2048, "num_warps": 8, "num_stages": 1})


class ExpertExchange:
    """Dispatch and combine over a communicator, for `num_local` experts on each rank."""

    def __init__(self, communicator: Communicator, num_local: int) -> None:
        self._group, self.num_local = communicator, num_local

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `dispatch_ref`, of this rank's contiguous x, experts (int32) and weights (fp32); unwanted rows are
        uninitialised. Raises ValueError when the tokens do not fit the lanes."""
        group, (num_tokens, width), top_k = self._group, x.shape, experts.shape[1]
        rows = x.new_empty(group.world * num_tokens, width)
        local = experts.new_empty(group.world * num_tokens, top_k)
        out_weights = torch.empty_like(local, dtype=torch.float32)
        row_bytes = _row_bytes(x)
        slot_bytes = row_bytes + 8 * _padded(top_k)
        grid = self._grid(num_tokens, slot_bytes)
        dispatch_kernel[grid](
            x, experts, weights, rows, local, out_weights, *group.arguments(),
            num_tokens, width, row_bytes, slot_bytes, group.lanes.lane_bytes, self.num_local,
            group.rank, group.spin_limit, **self._constants(top_k),
        )  # fmt: skip
        return rows, local, out_weights

    def combine(self, rows: Tensor, local: Tensor, experts: Tensor) -> Tensor:
        """rows [world * T, H] and local [world * T, K] in `dispatch`'s places, `experts` [T, K] as given to it.

        Returns this rank's [T, H]. Raises ValueError when the rows do not fit the lanes.
        """
        group, (num_tokens, top_k), width = self._group, experts.shape, rows.shape[1]
        out = rows.new_empty(num_tokens, width)
        row_bytes = _row_bytes(rows)
        grid = self._grid(num_tokens, row_bytes * group.world)
        combine_kernel[grid](
            rows, local, experts, out, *group.arguments(),
            num_tokens, width, row_bytes, group.lanes.lane_bytes, self.num_local,
            group.rank, group.spin_limit, **self._constants(top_k),
        )  # fmt: skip
        return out

    def _grid(self, num_tokens: int, bytes_per_token: int) -> tuple[int]:
        lanes = self._group.lanes
        programs = max(1, min(lanes.num_lanes, num_tokens))
        if -(-num_tokens // programs) * bytes_per_token > lanes.lane_bytes:
            raise ValueError(f"{num_tokens} tokens of {bytes_per_token} bytes do not fit {lanes}")
        return (programs,)

    def _constants(self, top_k: int) -> dict[str, Any]:
        group = {"LANES": self._group.lanes.num_lanes, "WORLD": self._group.world}
        return {"K": top_k, "KP": _padded(top_k), **group, **tiles("comm.all_to_all")}


def _row_bytes(x: Tensor) -> int:
    return -(-x.shape[1] * x.itemsize // 16) * 16


def _padded(top_k: int) -> int:
    return max(4, 1 << (top_k - 1).bit_length())


def _specs() -> tuple[KernelSpec, ...]:
    shared = {"PEERS": "*i64", "EPOCHS": "*i64", "POISON": "*i64"}
    sizes = ("num_tokens", "width", "row_bytes", "lane_bytes", "num_local", "rank", "limit")
    shared |= dict.fromkeys(sizes, "i32")
    into = {"X": "*bf16", "EXPERTS": "*i32", "WEIGHTS": "*fp32", "ROWS": "*bf16", "LOCAL": "*i32"}
    into |= {"OUT_WEIGHTS": "*fp32", "slot_bytes": "i32"}
    back = {"ROWS": "*bf16", "LOCAL": "*i32", "EXPERTS": "*i32", "OUT": "*bf16"}
    aligned = ("X", "EXPERTS", "WEIGHTS", "ROWS", "LOCAL", "OUT_WEIGHTS", "OUT", "PEERS", "EPOCHS", "POISON")
    aligned += ("width", "row_bytes", "slot_bytes", "lane_bytes")
    return tuple(
        KernelSpec(
            f"all_to_all.{name}.world{world}", kernel, shared | signature,
            {"K": 8, "KP": 8, "LANES": 64, "WORLD": world}, "comm.all_to_all",
            divisible_by_16=tuple(name for name in aligned if name in shared | signature),
        )
        for name, kernel, signature in (("dispatch", dispatch_kernel, into), ("combine", combine_kernel, back))
        for world in (2, 8)
    )  # fmt: skip


SPECS = _specs()
