"""Collectives between the ranks of one node, in Triton: how ranks meet, and all-reduce (one-shot, two-shot).

The all-to-all of experts, in `all_to_all.py`, meets the same way.

A rank's buffer is memory that every peer can address (`peers.py` says how). It is cut into lanes; program p of every
kernel uses lane p alone, so programs never depend on each other:

    0            ┌───────────────────────────────────────────────────────────────┐
                 │ lane 0's flags: word r int64 = last phase that rank r reached │  128 bytes a lane
                 │ ... one line a lane                                           │
    128 * LANES  ├───────────────────────────────────────────────────────────────┤
                 │ lane 0, half 0: lane_bytes │ lane 0, half 1: lane_bytes       │
                 │ ... two halves a lane                                         │
                 └───────────────────────────────────────────────────────────────┘

| word        | writer                    | readers             |                                              |
|-------------|---------------------------|---------------------|----------------------------------------------|
| flags[r]    | rank r (release, system)  | the owner (acquire) | only grows                                   |
| data        | the owner                 | every peer          | between the owner's signal and their next one |
| EPOCHS[p]   | program p of this rank    | the same            | private; collectives that this lane has done |
| POISON      | any program of this rank  | kernels and host    | private; 0, or who was waited for in vain    |

Invariants. All ranks launch the same collectives in the same order, on one stream, with the same shapes. Collective e
of a lane uses half e mod 2 and signals phase 2e - 1 when its data is there (two-shot: 2e when its share is reduced).
Half e mod 2 is free again at collective e + 2, because a peer signals 2(e + 1) - 1 only after it has finished e; so
there is no second barrier. Epochs live in device memory: a captured graph bakes scalars in.

A wait gives up after `limit` polls and sets POISON; every later kernel then returns at once, so one time-out drains
the queue. Outputs are undefined from then on: `Communicator.fault` must be None before a result is used.

Sums are in fp32 in rank order and rounded once, so all ranks hold the same bits, from either all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.peers import PeerBuffers, settle
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles

FLAG_BYTES = 128
"""Of each lane: one word a rank, and no two lanes on one cache line."""
WORLDS = (1, 2, 4, 8, FLAG_BYTES // 8)
_FLAG_BYTES = tl.constexpr(FLAG_BYTES)  # pyright: ignore[reportCallIssue]


@triton.jit
def place(PEERS, peer, lane, epoch, lane_bytes, offset, ELEMENT, LANES: tl.constexpr):
    """`offset` bytes (a multiple of 16) into the half of `peer`'s lane that collective `epoch` uses, as a pointer
    like ELEMENT."""
    begin = LANES * _FLAG_BYTES + (lane.to(tl.int64) * 2 + epoch % 2) * lane_bytes + offset
    address = (tl.load(PEERS + peer) + begin).to(tl.pointer_type(ELEMENT.dtype.element_ty))
    return tl.multiple_of(address, 16)  # lost in the cast, and without it loads are two bytes wide


@triton.jit
def meet(PEERS, POISON, rank, lane, phase, limit, WORLD: tl.constexpr):
    """Tell every peer that this lane has reached `phase`, and wait for them: 1, or 0 after `limit` polls in vain.

    One thread a peer, so that no store or poll waits for another's way through the fabric.
    """
    peer = tl.arange(0, WORLD)
    flags = tl.load(PEERS + peer) + lane * _FLAG_BYTES
    tl.debug_barrier()  # all threads' stores come before the releases
    tl.atomic_xchg(flags.to(tl.pointer_type(tl.int64)) + rank, phase, sem="release", scope="sys")
    mine = (tl.load(PEERS + rank) + lane * _FLAG_BYTES).to(tl.pointer_type(tl.int64)) + peer
    first_late = _first_late(mine, peer, phase, WORLD)
    polls = 0
    while (first_late < WORLD) & (polls < limit):
        first_late = _first_late(mine, peer, phase, WORLD)
        polls += 1
    if first_late < WORLD:
        # The first program to give up is the one that is kept.
        tl.atomic_cas(POISON, tl.full([], 0, tl.int64), phase * 256 + first_late + 1)
    tl.debug_barrier()
    return (first_late == WORLD).to(tl.int32)


@triton.jit
def _first_late(mine, peer, phase, WORLD: tl.constexpr):
    """The lowest rank that has not reached `phase`, or WORLD."""
    seen = tl.atomic_add(mine, tl.zeros([WORLD], tl.int64), sem="acquire", scope="sys")
    return tl.min(tl.where(seen < phase, peer, WORLD), 0)


@triton.jit
def copy(TO, FROM, count, VOLATILE: tl.constexpr, BLOCK: tl.constexpr):
    """`count` elements. VOLATILE: FROM is memory that another device writes."""
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(TO + at, tl.load(FROM + at, at < count, volatile=VOLATILE), at < count)


@triton.jit
def _sum_tile(PEERS, lane, epoch, lane_bytes, ELEMENT, at, mask, LANES: tl.constexpr, WORLD: tl.constexpr):
    total = tl.zeros(at.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        theirs = place(PEERS, peer, lane, epoch, lane_bytes, 0, ELEMENT, LANES)
        total += tl.load(theirs + at, mask, volatile=True).to(tl.float32)
    return total.to(ELEMENT.dtype.element_ty)


@triton.jit(do_not_specialize=["rank", "limit"])
def one_shot_kernel(
    X, OUT, PEERS, EPOCHS, POISON, numel, span, lane_bytes, rank, limit,
    LANES: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every rank reads everything: one meeting. Lane p has elements [p * span, (p + 1) * span)."""
    if tl.load(POISON) != 0:
        return
    lane = tl.program_id(0)
    epoch = tl.load(EPOCHS + lane) + 1
    begin = lane * span
    count = tl.minimum(span, numel - begin)
    copy(place(PEERS, rank, lane, epoch, lane_bytes, 0, X, LANES), X + begin, count, False, BLOCK)
    if meet(PEERS, POISON, rank, lane, 2 * epoch - 1, limit, WORLD) == 1:
        for tile in range(0, count, BLOCK):
            at = tile + tl.arange(0, BLOCK)
            total = _sum_tile(PEERS, lane, epoch, lane_bytes, X, at, at < count, LANES, WORLD)
            tl.store(OUT + begin + at, total, at < count)
    tl.store(EPOCHS + lane, epoch)


@triton.jit(do_not_specialize=["rank", "limit"])
def two_shot_kernel(
    X, OUT, PEERS, EPOCHS, POISON, numel, span, lane_bytes, rank, limit,
    LANES: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank r reduces the r-th share of each lane in place, then all read all shares: two meetings, less traffic."""
    if tl.load(POISON) != 0:
        return
    lane = tl.program_id(0)
    epoch = tl.load(EPOCHS + lane) + 1
    begin = lane * span
    count = tl.minimum(span, numel - begin)
    share = span // WORLD
    mine = place(PEERS, rank, lane, epoch, lane_bytes, 0, X, LANES)
    copy(mine, X + begin, count, False, BLOCK)
    if meet(PEERS, POISON, rank, lane, 2 * epoch - 1, limit, WORLD) == 1:
        # In place: nobody else reads the owner's own share of its own buffer before the second meeting.
        for tile in range(0, share, BLOCK):
            at = rank * share + tile + tl.arange(0, BLOCK)
            tl.store(mine + at, _sum_tile(PEERS, lane, epoch, lane_bytes, X, at, at < count, LANES, WORLD), at < count)
        if meet(PEERS, POISON, rank, lane, 2 * epoch, limit, WORLD) == 1:
            for peer in range(WORLD):
                theirs = place(PEERS, peer, lane, epoch, lane_bytes, 0, X, LANES)
                for tile in range(0, share, BLOCK):
                    at = peer * share + tile + tl.arange(0, BLOCK)
                    tl.store(OUT + begin + at, tl.load(theirs + at, at < count, volatile=True), at < count)
    tl.store(EPOCHS + lane, epoch)


def all_reduce_ref(inputs: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks' tensors, in fp32 and rank order, in their dtype."""
    total = inputs[0].float()
    for other in inputs[1:]:
        total = total + other.float()
    return total.to(inputs[0].dtype)


register("comm.all_reduce", any={"BLOCK": 4096, "num_warps": 8, "num_stages": 1})
ONE_SHOT_BYTES = 512 << 10
"""Read by a rank up to here, one-shot's single meeting should cost less than two-shot's traffic saves. An estimate, not
yet measured on GPUs."""


@dataclass(frozen=True)
class Lanes:
    """How a rank's buffer is cut."""

    num_lanes: int = 64
    lane_bytes: int = 128 << 10

    @property
    def nbytes(self) -> int:
        return self.num_lanes * (FLAG_BYTES + 2 * self.lane_bytes)


@dataclass(frozen=True)
class Fault:
    """Which rank did not come, to which meeting (2 * epoch - 1 or 2 * epoch of the lane that gave up first)."""

    peer: int
    phase: int


class Communicator:
    """One rank's side of a group: the pointer table, epochs and poison on the device, and the launches.

    Collectives of one communicator run on one stream at a time; two that may overlap need two communicators.
    """

    def __init__(self, peers: PeerBuffers, addresses: Sequence[int], lanes: Lanes, spin_limit: int) -> None:
        """`addresses`: every rank's buffer as `peers.connect` gave it. `spin_limit`: polls, about 1 us each on a GPU.

        Raises ValueError for buffers smaller than the lanes or misaligned, or a world that is no power of two to 16.
        """
        if peers.nbytes < lanes.nbytes or lanes.lane_bytes % 16:
            raise ValueError(f"the buffer has {peers.nbytes} bytes; lanes, in multiples of 16, need {lanes.nbytes}")
        if len(addresses) not in WORLDS or any(address % 16 for address in addresses):
            raise ValueError(f"{len(addresses)} ranks; can be {WORLDS}, with buffers aligned to 16 bytes")
        self.rank, self.world, self.lanes = peers.rank, len(addresses), lanes
        self.spin_limit = spin_limit
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=peers.device)
        self.epochs = torch.zeros(lanes.num_lanes, dtype=torch.int64, device=peers.device)
        self.poison = torch.zeros(1, dtype=torch.int64, device=peers.device)
        settle(peers.device)

    def fault(self) -> Fault | None:
        """Who was waited for in vain, if anybody. Waits for the device."""
        word = int(self.poison.item())
        return Fault(peer=word % 256 - 1, phase=word // 256) if word else None

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum over all ranks of contiguous x, into `out` (may be x). Raises ValueError when it does not fit."""
        small = x.nbytes * (self.world - 1) <= ONE_SHOT_BYTES
        return self.one_shot(x, out) if small else self.two_shot(x, out)

    def one_shot(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._reduce(one_shot_kernel, x, out, multiple=1)

    def two_shot(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self._reduce(two_shot_kernel, x, out, multiple=self.world)

    def _reduce(self, kernel, x: Tensor, out: Tensor | None, multiple: int) -> Tensor:
        tile = tiles("comm.all_reduce")
        out = torch.empty_like(x) if out is None else out
        unit = tile["BLOCK"] * multiple
        programs = min(self.lanes.num_lanes, triton.cdiv(x.numel(), unit))
        span = triton.cdiv(triton.cdiv(x.numel(), programs), unit) * unit
        if span * x.itemsize > self.lanes.lane_bytes:
            raise ValueError(f"{x.nbytes} bytes do not fit the {self.lanes.num_lanes} lanes")
        # Rounding span up may leave the last programs without elements.
        grid = (triton.cdiv(x.numel(), span),)
        kernel[grid](x, out, *self.arguments(), x.numel(), span, self.lanes.lane_bytes, self.rank, self.spin_limit,
                     LANES=self.lanes.num_lanes, WORLD=self.world, **tile)  # fmt: skip
        return out

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """PEERS, EPOCHS, POISON, for every kernel that meets."""
        return self.pointers, self.epochs, self.poison


def _specs() -> tuple[KernelSpec, ...]:
    signature = {"X": "*bf16", "OUT": "*bf16", "PEERS": "*i64", "EPOCHS": "*i64", "POISON": "*i64"}
    signature |= dict.fromkeys(("numel", "span", "lane_bytes", "rank", "limit"), "i32")
    aligned = ("X", "OUT", "PEERS", "EPOCHS", "POISON", "numel", "span", "lane_bytes")
    return tuple(
        KernelSpec(
            f"comm.{name}.world{world}", kernel, signature, {"LANES": 64, "WORLD": world}, "comm.all_reduce",
            divisible_by_16=aligned,
        )
        for name, kernel in (("one_shot", one_shot_kernel), ("two_shot", two_shot_kernel))
        for world in (2, 8)
    )  # fmt: skip


SPECS = _specs()
