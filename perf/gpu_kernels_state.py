"""Cases of the other kernels: experts, sampling and verification, block copies, device row state, collectives of one.

Collectives between ranks need ranks: their checks are in `gpu_probes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perf.gpu_case import BF16_TOLERANCE, FP32_TOLERANCE, Case, Check, Maker, Outputs, host
from slipring.kernels import block_copy, moe_gemm, moe_route, row_state
from slipring.kernels import spec_verify as verify
from slipring.kernels.logprobs import gather_logprobs_ref, gather_logprobs_triton
from slipring.kernels.row_state import DecodeInputs
from slipring.kernels.sampling import GREEDY_BELOW, DrawParams, apply_penalties_ref, draw_ref
from slipring.kernels.sampling_triton import apply_penalties_triton, draw_triton
from slipring.kernels.token_mask import apply_token_mask_ref, apply_token_mask_triton
from tests.kernels.draft_trees import random_trees

NEAR_TIES = 0.02
"""Share of draws that the last bit of an exponential may decide otherwise (as in DESIGN.md, "Equal")."""


def route(make: Maker, tokens: int, experts: int, top_k: int) -> Case:
    logits = make.normal(tokens, experts, dtype=torch.float32)
    return Case(
        run=lambda: moe_route.route_topk_triton(logits, top_k, True),
        ref=lambda: moe_route.route_topk_ref(host(logits), top_k, True),
        tolerance=FP32_TOLERANCE,
        nbytes=logits.nbytes,
        roof="none",
    )


def _chosen(make: Maker, tokens: int, experts: int, top_k: int) -> Tensor:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    return make.put(scores.argsort(1)[:, :top_k].int())


def sort(make: Maker, tokens: int, experts: int, top_k: int, rows: int) -> Case:
    """Some of the experts are on another rank (-1), and some tokens are padding."""
    chosen = _chosen(make, tokens, experts, top_k)
    chosen = chosen.masked_fill(chosen % 5 == 3, -1)
    chosen[::9] = -1

    def parts(found: moe_route.SortedSlots) -> Outputs:
        return found.slots, found.num_rows

    return Case(
        run=lambda: parts(moe_route.sort_by_expert_triton(chosen, experts, rows)),
        ref=lambda: parts(moe_route.sort_by_expert_ref(host(chosen), experts, rows)),
        roof="none",
    )


def grouped(make: Maker, tokens: int, experts: int, top_k: int, n: int, k: int, roof: str = "bf16") -> Case:
    num_slots, rows = tokens * top_k, moe_gemm.choose_tile_rows(tokens * top_k, experts)
    slots = moe_route.sort_by_expert_ref(_chosen(Maker("cpu"), tokens, experts, top_k), experts, rows)
    x, weight = make.normal(tokens, k), make.normal(experts, n, k, scale=k**-0.5)
    placed = moe_route.SortedSlots(
        make.put(slots.slots), make.put(slots.tile_expert), make.put(slots.num_rows), rows
    )  # fmt: skip
    few = slots.slots[slots.slots < num_slots][:64].long()

    def ref() -> list[Tensor]:
        """Slots of the first experts alone, so that a large case does not copy and multiply all."""
        expert_of = torch.full((num_slots,), -1)
        tiles = slots.slots.view(-1, rows)
        for tile in range(int(slots.num_rows) // rows):
            inside = tiles[tile][tiles[tile] < num_slots].long()
            expert_of[inside] = int(slots.tile_expert[tile])
        products = [host(x[slot // top_k]).float() @ host(weight[expert_of[slot]]).float().T for slot in few.tolist()]
        return [torch.stack(products).to(x.dtype)]

    return Case(
        run=lambda: [moe_gemm.moe_gemm_triton(x, weight, placed, num_slots, None)],
        ref=ref,
        tolerance=BF16_TOLERANCE,
        nbytes=weight.nbytes + 2 * (x.numel() + num_slots * n),
        flops=2 * num_slots * n * k,
        roof=roof,
        pick=lambda out: [out[0][few.to(out[0].device)]],
    )


def penalties(make: Maker, rows: int, vocab: int) -> Case:
    logits = make.normal(rows, vocab, dtype=torch.float32)
    mask = make.integers(0, 4, rows, vocab) == 0
    counts = make.integers(-9, 4, rows, vocab).clamp(min=0)
    rates = [make.normal(rows, dtype=torch.float32).abs() + 0.5 for _ in range(3)]

    def on(run: Callable[..., None], *inputs: Tensor) -> Outputs:
        out = inputs[0].clone()
        run(out, *inputs[1:])
        return [out]

    inputs = (logits, mask, counts, *rates)
    return Case(
        run=lambda: on(apply_penalties_triton, *inputs),
        ref=lambda: on(apply_penalties_ref, *map(host, inputs)),
        tolerance=4 * FP32_TOLERANCE,
        nbytes=rows * vocab * (4 * 4 + 1 + 4),  # with the copy that keeps the input
    )


def draw(make: Maker, rows: int, vocab: int) -> Case:
    """Every mix of filters, at temperatures about 1."""
    logits = make.normal(rows, vocab, dtype=torch.float32, scale=3.0)
    index = torch.arange(rows)
    params = DrawParams(
        temperature=make.put(0.7 + 0.1 * (index % 8)),
        top_k=make.put(torch.tensor([0, 1, 7, 50])[index % 4]),
        top_p=make.put(torch.tensor([1.0, 0.9, 0.3])[index % 3]),
        min_p=make.put(torch.tensor([0.0, 0.0, 0.1])[index // 3 % 3]),
        seed=make.integers(0, 2**31, rows, 2, dtype=torch.int64),
        position=make.put(index + 100),
        choice=make.put(index % 3),
    )
    columns = [getattr(params, name) for name in DrawParams.__slots__]
    return Case(
        run=lambda: [draw_triton(logits, *columns, greedy_below=GREEDY_BELOW)],
        ref=lambda: [draw_ref(host(logits), DrawParams(*map(host, columns)))],
        mismatches=NEAR_TIES,
        nbytes=logits.nbytes,
    )


def masked(make: Maker, rows: int, vocab: int) -> Case:
    """Half of the rows have a mask, each of random bits."""
    scores = make.normal(rows, vocab, dtype=torch.float32)
    at = make.put(torch.arange(0, rows, 2))
    chance, num_words = torch.Generator().manual_seed(rows), -(-vocab // 32)
    words = torch.randint(-(1 << 31), 1 << 31, (len(at), num_words), generator=chance)
    allowed = make.put(words.int())

    def on(run: Any, scores: Tensor, at: Tensor, allowed: Tensor) -> Outputs:
        scores = scores.clone()
        run(scores, at, allowed)
        return (scores,)

    inputs = (scores, at, allowed)
    return Case(
        run=lambda: on(apply_token_mask_triton, *inputs),
        ref=lambda: on(apply_token_mask_ref, *map(host, inputs)),
        nbytes=len(at) * scores.stride(0) * 4 + allowed.nbytes,
    )


def logprobs(make: Maker, rows: int, vocab: int) -> Case:
    logits, tokens = make.normal(rows, vocab, dtype=torch.float32), make.integers(0, vocab, rows, dtype=torch.int64)
    return Case(
        run=lambda: gather_logprobs_triton(logits, tokens),
        ref=lambda: gather_logprobs_ref(host(logits), host(tokens)),
        tolerance=FP32_TOLERANCE,
        nbytes=logits.nbytes,
    )


def verify_chain(make: Maker, rows: int, width: int) -> Case:
    drafts, targets = make.integers(0, 2, rows, width), make.integers(0, 2, rows, width + 1)
    inputs = (drafts.long(), targets.long(), make.integers(0, width + 1, rows))
    return Case(lambda: verify.verify_chain_triton(*inputs), lambda: verify.verify_chain_ref(*map(host, inputs)),
                roof="none")  # fmt: skip


def verify_tree(make: Maker, rows: int, width: int) -> Case:
    tree = random_trees(rows, width)
    inputs: list[Any] = [*map(make.put, tree[:-1]), tree[-1]]
    return Case(lambda: verify.verify_tree_triton(*inputs), lambda: verify.verify_tree_ref(*tree),
                roof="none")  # fmt: skip


def blocks(make: Maker, form: str, planes: int, count: int, words: int) -> Case:
    """`count` blocks of `words` bf16 a plane, within the pool, into staging or out of it."""
    pool, staging = make.normal(planes, 2 * count, words), make.normal(count, planes, words)
    order = make.shuffled(2 * count)
    sources, targets = make.put(order[:count].int()), make.put(order[count:].int())
    run: Any = getattr(block_copy, f"{form}_blocks_triton")
    ref: Any = getattr(block_copy, f"{form}_blocks_ref")

    def on(run: Any, pool: Tensor, staging: Tensor, sources: Tensor, targets: Tensor) -> Outputs:
        if form == "copy":
            run(pool, sources, targets)
        else:
            first, last = (pool, staging) if form == "gather" else (staging, pool)
            run(first, sources, last)
        return pool, staging

    inputs = (pool, staging, sources, targets)
    return Case(lambda: on(run, *inputs), lambda: on(ref, *map(host, inputs)), nbytes=2 * staging.nbytes)


def rows_state(make: Maker, num_rows: int, count: int) -> Case:
    """One decode step's updates: blocks appended, a column assigned, inputs made, tokens committed."""
    size = 4
    columns = [
        make.integers(0, 50000, num_rows, dtype=torch.int64),
        make.integers(0, 9 * size, num_rows),
        make.integers(0, 10**6, num_rows, 9),
    ]
    rows = make.shuffled(num_rows)[:count].int()
    rows[1::5] = -1
    inputs = (*columns, make.put(rows), make.put(torch.arange(count)))

    def on(kind: str, *inputs: Tensor) -> Outputs:
        state: Any = {name: getattr(row_state, f"{name}_{kind}") for name in _STATE}
        last, computed, table, rows, values = (x.clone() for x in inputs)
        state["append_blocks"](table, rows, (values % 9).int(), values.int())
        state["assign"](last, rows, values)
        out = DecodeInputs.empty(count, rows.device)
        state["decode_inputs"](rows, last, computed, table, size, out)
        state["commit_tokens"](rows, values - 3, torch.ones_like(rows), last, computed)
        return last, computed, table, out.input_ids, out.positions, out.slot_mapping, out.context_lens

    return Case(lambda: on("triton", *inputs), lambda: on("ref", *map(host, inputs)), roof="none")


_STATE = ("append_blocks", "assign", "decode_inputs", "commit_tokens")
_VOCAB = 128256
CHECKS = (
    Check("moe_route.topk", "moe_route", route, (9, 60, 4), {"4096 x 128": (4096, 128, 8)}),
    Check("moe_route.sort", "moe_route", sort, (50, 6, 3, 16), {"4096 x 8 of 128": (4096, 128, 8, 128)}),
    Check("moe_gemm", "moe_gemm", grouped, (20, 5, 2, 72, 200),
          {"16 tokens, 8 of 64": (16, 64, 8, 2048, 2048, "memory"), "4096 tokens, 8 of 64": (4096, 64, 8, 2048, 2048)}),
    Check("sampling.penalties", "sampling_triton", penalties, (3, 2100), {"256 rows": (256, _VOCAB)}),
    Check("sampling.draw", "sampling_triton", draw, (12, 700), {"64 rows": (64, _VOCAB)}),
    Check("token_mask", "token_mask", masked, (5, 2100), {"64 rows": (64, _VOCAB)}),
    Check("logprobs", "logprobs", logprobs, (3, 5000), {"256 rows": (256, _VOCAB)}),
    Check("spec_verify.chain", "spec_verify", verify_chain, (40, 7), {"256 rows of 8": (256, 8)}),
    Check("spec_verify.tree", "spec_verify", verify_tree, (6, 11), {"256 trees of 64": (256, 64)}),
    *(Check(f"block_copy.{form}", "block_copy", blocks, (form, 3, 4, 1100), {"64 blocks": (form, 64, 64, 16384)})
      for form in ("copy", "gather", "scatter")),
    Check("row_state", "row_state", rows_state, (300, 257), {"256 of 1024": (1024, 256)}),
)  # fmt: skip
