"""Draws on the GPU's path equal the CPU sampler's and follow their distribution; penalties equal theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels.jit import tl, triton
from slipring.kernels.philox import PURPOSE_SAMPLE, gumbel_for_block, noise_for_vocab
from slipring.kernels.sampling import GREEDY_BELOW, DrawParams, apply_penalties_ref, draw_ref
from slipring.kernels.sampling_triton import apply_penalties_triton, draw_triton
from tests.kernels.tolerances import TOLERANCE

MIX = [(top_k, top_p, min_p) for top_k in (0, 1, 7, 5000) for top_p in (1.0, 0.9, 0.3, 1e-4) for min_p in (0.0, 0.1)]


def keyed(filters: list[tuple[int, float, float]], temperature: float, first_position: int = 0) -> DrawParams:
    num_rows = len(filters)
    top_k, top_p, min_p = zip(*filters, strict=True)
    generator = torch.Generator().manual_seed(num_rows)
    return DrawParams(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seed=torch.randint(0, 2**32, (num_rows, 2), generator=generator),
        position=torch.arange(num_rows) + first_position,
        choice=torch.arange(num_rows) % 3,
    )


def draw_on_gpu_path(logits: Tensor, params: DrawParams) -> Tensor:
    return draw_triton(logits, *(getattr(params, name) for name in params.__slots__), greedy_below=GREEDY_BELOW)


@triton.jit
def noise_kernel(OUT, SEED, POSITION, CHOICE, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.program_id(0) * BLOCK
    seed_low, seed_high = tl.load(SEED), tl.load(SEED + 1)
    noise = gumbel_for_block(begin, seed_low, seed_high, tl.load(POSITION), tl.load(CHOICE), PURPOSE, BLOCK)
    tl.store(OUT + begin + tl.arange(0, BLOCK), noise)


def test_noise_is_philox_pys() -> None:
    seed = torch.tensor([[0xFFFFFFFF, 0x80000001]])
    position, choice = torch.tensor([131_000]), torch.tensor([5])
    out = torch.empty(4096)
    noise_kernel[(4,)](out, seed, position, choice, PURPOSE_SAMPLE, 1024)
    expected = noise_for_vocab(4096, seed, position, choice)[0]
    assert (out - expected).abs().max() <= 2e-6


@pytest.mark.parametrize(("width", "temperature"), [(50, 0.7), (4200, 1.9)])
def test_every_mix_of_filters_draws_the_cpus_tokens(width: int, temperature: float) -> None:
    logits = torch.randn(len(MIX), width, generator=torch.Generator().manual_seed(width)) * 3
    logits[:, 5:9] = logits[:, 4:5]  # ties
    logits[1::3, ::7] = float("-inf")  # a grammar's mask
    params = keyed(MIX, temperature)
    assert torch.equal(draw_on_gpu_path(logits, params), draw_ref(logits, params))


def test_odd_rows_draw_the_cpus_tokens() -> None:
    width = 30
    rows = [torch.full((width,), -2.5), torch.full((width,), float("-inf")), torch.arange(width) * 1e30 - 1.5e31]
    rows += [torch.arange(width) * 1e-42, torch.arange(width) % 2 * -0.0, torch.arange(width) % 3 - 1e4]
    logits = torch.stack(rows).float()
    logits[1, 17] = -3.0
    for filters in [(2, 1.0, 0.0), (0, 0.5, 0.0), (3, 0.5, 0.9), (0, 1.0, 0.0)]:
        params = keyed([filters] * len(rows), 1.0)
        assert torch.equal(draw_on_gpu_path(logits, params), draw_ref(logits, params)), filters


def test_greedy_rows_take_the_first_best_token() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    logits[:, 300] = logits[:, 650] = 9
    assert draw_on_gpu_path(logits, keyed([(0, 1.0, 0.0), (5, 0.9, 0.1), (0, 0.5, 0.0)], 0.0)).tolist() == [300] * 3


def test_draws_follow_the_distribution() -> None:
    num_rows = 256
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0)).expand(num_rows, -1).contiguous()
    params = keyed([(0, 1.0, 0.0)] * num_rows, 1.0)
    params.seed[:] = torch.tensor([123, 456])
    expected = logits[0].softmax(0) * num_rows
    counts = torch.bincount(draw_on_gpu_path(logits, params), minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_penalties() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 2100, generator=generator)
    ours = logits.clone()
    prompt_mask = torch.rand(logits.shape, generator=generator) < 0.3
    counts = torch.randint(-9, 4, logits.shape, generator=generator, dtype=torch.int32).clamp(min=0)
    rates = [torch.rand(3, generator=generator) + 0.5 for _ in range(3)]
    apply_penalties_ref(logits, prompt_mask, counts, *rates)
    apply_penalties_triton(ours, prompt_mask, counts, *rates)
    assert (ours - logits).abs().max() <= TOLERANCE[torch.float32]
