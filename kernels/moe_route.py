"""Routing of a mixture of experts: each token's top k, and tokens sorted by expert for the grouped GEMM.

A *slot* is one (token, choice) pair, numbered token * k + choice. `sort_by_expert` lists the slots expert by expert,
in rising order, each expert's list padded to whole tiles of `tile_rows` with the number of slots, which is no slot.
Sizes are bounds that depend on shapes alone, so that a captured graph can replay them; `num_rows` says how much is
used. A slot whose expert is negative (it lives on another rank) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.spec import KernelSpec
from slipring.kernels.tiles import register, tiles


@dataclass(frozen=True, slots=True)
class SortedSlots:
    slots: Tensor
    """int32 [capacity]."""
    tile_expert: Tensor
    """int32 [capacity / tile_rows]: whose tile it is; meaningless beyond num_rows / tile_rows."""
    num_rows: Tensor
    """int32 [1]: entries of `slots` in use, a multiple of tile_rows."""
    tile_rows: int


def route_topk_ref(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (weights [T, k] float32, experts [T, k] int32), best first; of equals the lower expert first.

    Weights are the softmax over all experts, divided by their sum over the k if `renormalize`. A token whose logits are
    not finite gets weights of NaN, and experts that exist: it must not read what is nobody's weight.
    """
    probs = logits.float().softmax(-1)
    ordered, experts = probs.sort(dim=-1, descending=True, stable=True)
    weights = ordered[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.contiguous(), experts[:, :top_k].int()


def sort_by_expert_ref(experts: Tensor, num_experts: int, tile_rows: int) -> SortedSlots:
    """experts [T, k] int32, negative for absent ones."""
    flat = experts.flatten().long()
    capacity = _capacity(flat.numel(), num_experts, tile_rows)
    present = flat >= 0
    counts = torch.bincount(flat[present], minlength=num_experts)
    ends = (-(-counts // tile_rows) * tile_rows).cumsum(0)
    slots = flat.new_full((capacity,), flat.numel(), dtype=torch.int32)
    order = flat.argsort(stable=True)[flat.numel() - int(present.sum()) :]
    begins = torch.cat((ends.new_zeros(1), ends[:-1])) - (counts.cumsum(0) - counts)
    slots[torch.arange(len(order), device=flat.device) + begins[flat[order]]] = order.int()
    tile_begins = torch.arange(0, capacity, tile_rows, device=flat.device)
    tile_expert = torch.searchsorted(ends, tile_begins, right=True).int()
    return SortedSlots(slots, tile_expert, ends[-1:].int(), tile_rows)


def _capacity(num_slots: int, num_experts: int, tile_rows: int) -> int:
    """Each expert that has a slot wastes up to tile_rows - 1 rows."""
    return -(-(num_slots + min(num_slots, num_experts) * (tile_rows - 1)) // tile_rows) * tile_rows


# The number of tokens is no reason to compile anew: that would happen in the middle of serving.
@triton.jit(do_not_specialize=["num_tokens"])
def route_topk_kernel(
    LOGITS, WEIGHTS, EXPERTS, num_tokens, num_experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens a program; K and E are TOP_K and num_experts rounded up to powers of two."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, E)
    inside = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    at = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    logits = tl.load(LOGITS + at, inside, -float("inf")).to(tl.float32)
    logits = tl.where((token < num_tokens)[:, None], logits, 0.0)  # no NaN in rows that are no tokens
    exps = tl.exp(logits - tl.max(logits, 1)[:, None])
    probs = exps / tl.sum(exps, 1)[:, None]
    choice = tl.arange(0, K)
    weights = tl.zeros([TOKENS, K], tl.float32)
    experts = tl.zeros([TOKENS, K], tl.int32)
    # NaN wins no comparison: the index that argmax made of it could be any.
    left = tl.where(expert[None, :] < num_experts, tl.where(probs == probs, probs, 0.0), -1.0)
    for i in range(TOP_K):
        best = tl.argmax(left, 1)
        weights = tl.where(choice[None, :] == i, tl.max(left, 1)[:, None], weights)
        experts = tl.where(choice[None, :] == i, best[:, None], experts)
        left = tl.where(expert[None, :] == best[:, None], -2.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 1)[:, None]
    weights += tl.sum(probs, 1)[:, None] * 0.0  # NaN where the logits were not finite
    at = token.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    mask = (token < num_tokens)[:, None] & (choice < TOP_K)[None, :]
    tl.store(WEIGHTS + at, weights, mask)
    tl.store(EXPERTS + at, experts, mask)


@triton.jit(do_not_specialize=["num_slots", "num_chunks"])
def count_experts_kernel(EXPERTS, COUNTS, num_slots, num_chunks, E: tl.constexpr, CHUNK: tl.constexpr):
    """COUNTS[expert, chunk]: how many slots of the chunk have this expert."""
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = tl.load(EXPERTS + slot, slot < num_slots, -1)
    expert = tl.arange(0, E)
    counts = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(COUNTS + expert * num_chunks + chunk, counts)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_chunks_kernel(COUNTS, TOTALS, num_chunks, BLOCK: tl.constexpr):
    """One program an expert: its counts become what the earlier chunks hold; TOTALS[expert] is the whole."""
    expert = tl.program_id(0)
    before = 0
    for begin in range(0, num_chunks, BLOCK):
        chunk = begin + tl.arange(0, BLOCK)
        at = COUNTS + expert * num_chunks + chunk
        counts = tl.load(at, chunk < num_chunks, 0)
        tl.store(at, before + tl.cumsum(counts, 0) - counts, chunk < num_chunks)
        before += tl.sum(counts, 0)
    tl.store(TOTALS + expert, before)


@triton.jit(do_not_specialize=["num_slots", "num_chunks", "num_tiles"])
def place_slots_kernel(
    EXPERTS, BEFORE, TOTALS, SLOTS, TILE_EXPERT, NUM_ROWS, num_slots, num_chunks, num_tiles, tile_rows,
    E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p places the slots of chunk p and names the expert of tiles p * CHUNK onwards."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, E)
    rows = tl.cdiv(tl.load(TOTALS + expert), tile_rows) * tile_rows
    ends = tl.cumsum(rows, 0)
    tile = chunk * CHUNK + tl.arange(0, CHUNK)
    owner = tl.sum((ends[None, :] <= (tile * tile_rows)[:, None]).to(tl.int32), 1)
    tl.store(TILE_EXPERT + tile, owner, tile < num_tiles)
    if chunk == 0:
        tl.store(NUM_ROWS, tl.sum(rows, 0))
    if chunk < num_chunks:
        slot = chunk * CHUNK + tl.arange(0, CHUNK)
        mine = tl.load(EXPERTS + slot, slot < num_slots, -1)
        same = (mine[:, None] == expert[None, :]).to(tl.int32)
        begin = ends - rows + tl.load(BEFORE + expert * num_chunks + chunk)
        at = tl.sum(same * (begin[None, :] + tl.cumsum(same, 0) - 1), 1)
        tl.store(SLOTS + at, slot, mine >= 0)


register("moe_route.topk", any={"TOKENS": 4, "num_warps": 4, "num_stages": 1})
register("moe_route.sort", any={"CHUNK": 32, "num_warps": 8, "num_stages": 1})
register("moe_route.scan", any={"BLOCK": 1024, "num_warps": 4, "num_stages": 1})


def route_topk_triton(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """As `route_topk_ref`; logits contiguous."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, device=logits.device, dtype=torch.float32)
    experts = torch.empty(num_tokens, top_k, device=logits.device, dtype=torch.int32)
    tile = tiles("moe_route.topk")
    sizes = {"K": triton.next_power_of_2(top_k), "E": triton.next_power_of_2(num_experts)}
    route_topk_kernel[(triton.cdiv(num_tokens, tile["TOKENS"]),)](
        logits, weights, experts, num_tokens, num_experts, TOP_K=top_k, RENORMALIZE=renormalize, **sizes, **tile
    )
    return weights, experts


def sort_by_expert_triton(experts: Tensor, num_experts: int, tile_rows: int) -> SortedSlots:
    """As `sort_by_expert_ref`; experts contiguous."""
    num_slots, width, tile = experts.numel(), triton.next_power_of_2(num_experts), tiles("moe_route.sort")
    capacity = _capacity(num_slots, num_experts, tile_rows)
    num_chunks, num_tiles = triton.cdiv(num_slots, tile["CHUNK"]), capacity // tile_rows
    empty = experts.new_empty
    counts, totals, tile_expert, num_rows = empty(width, num_chunks), empty(width), empty(num_tiles), empty(1)
    slots = experts.new_full((capacity,), num_slots)
    count_experts_kernel[(num_chunks,)](experts, counts, num_slots, num_chunks, E=width, **tile)
    scan_chunks_kernel[(width,)](counts, totals, num_chunks, **tiles("moe_route.scan"))
    place_slots_kernel[(max(num_chunks, triton.cdiv(num_tiles, tile["CHUNK"])),)](
        experts, counts, totals, slots, tile_expert, num_rows, num_slots, num_chunks, num_tiles, tile_rows,
        E=width, **tile,
    )  # fmt: skip
    return SortedSlots(slots, tile_expert, num_rows, tile_rows)


def route_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """As `route_topk_ref`, on whatever device the logits are."""
    return (route_topk_triton if logits.is_cuda else route_topk_ref)(logits, top_k, renormalize)


def sort_by_expert(experts: Tensor, num_experts: int, tile_rows: int) -> SortedSlots:
    """As `sort_by_expert_ref`, on whatever device `experts` is."""
    return (sort_by_expert_triton if experts.is_cuda else sort_by_expert_ref)(experts, num_experts, tile_rows)


def _specs() -> tuple[KernelSpec, ...]:
    topk = {"LOGITS": "*bf16", "WEIGHTS": "*fp32", "EXPERTS": "*i32", "num_tokens": "i32", "num_experts": "i32"}
    count = {"EXPERTS": "*i32", "COUNTS": "*i32", "num_slots": "i32", "num_chunks": "i32"}
    place = {name: "*i32" for name in ("EXPERTS", "BEFORE", "TOTALS", "SLOTS", "TILE_EXPERT", "NUM_ROWS")}
    place |= {name: "i32" for name in ("num_slots", "num_chunks", "num_tiles", "tile_rows")}
    scan = {"COUNTS": "*i32", "TOTALS": "*i32", "num_chunks": "i32"}
    found = [KernelSpec("moe_route.scan", scan_chunks_kernel, scan, {}, "moe_route.scan")]
    for experts, k in ((8, 2), (256, 8)):
        sizes = {"TOP_K": k, "K": k, "E": experts, "RENORMALIZE": True}
        found += [
            KernelSpec(f"moe_route.topk.{k}of{experts}", route_topk_kernel, topk, sizes, "moe_route.topk"),
            KernelSpec(f"moe_route.count.{experts}", count_experts_kernel, count, {"E": experts}, "moe_route.sort"),
            KernelSpec(f"moe_route.place.{experts}", place_slots_kernel, place, {"E": experts}, "moe_route.sort"),
        ]
    return tuple(found)


SPECS = _specs()
