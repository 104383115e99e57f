"""Block copies, device row state and logprobs against their references; all but logprobs exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipring.kernels import block_copy, row_state
from slipring.kernels.logprobs import gather_logprobs_ref, gather_logprobs_triton
from slipring.kernels.row_state import DecodeInputs
from tests.kernels.tolerances import DTYPES, TOLERANCE


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def filled_pool(dtype: torch.dtype) -> Tensor:
    """3 planes of 7 blocks of 8,800 bytes."""
    return torch.randint(0, 255, (3, 7, 4, 2, 1100), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_block_copy_gather_and_scatter(dtype: torch.dtype) -> None:
    pool = filled_pool(dtype)
    before = pool.clone().view(torch.uint8)
    block_copy.copy_blocks_triton(pool, integers(6, 0), integers(2, 5))
    expected = before.clone()
    block_copy.copy_blocks_ref(expected, integers(6, 0), integers(2, 5))
    assert torch.equal(pool.view(torch.uint8), expected) and torch.equal(expected[:, 2], before[:, 6])

    staging = torch.zeros((4, 3, *pool.shape[2:]), dtype=dtype)
    theirs = torch.zeros_like(staging.view(torch.uint8))
    blocks = integers(5, 1, 3, dtype=torch.int64)
    block_copy.gather_blocks_triton(pool, blocks, staging)
    block_copy.gather_blocks_ref(pool.view(torch.uint8), blocks, theirs)
    assert torch.equal(staging.view(torch.uint8), theirs) and not theirs[3].any()
    assert torch.equal(theirs[1, 2], pool.view(torch.uint8)[2, 1])

    targets = integers(0, 4)
    block_copy.scatter_blocks_triton(staging, targets, pool)
    block_copy.scatter_blocks_ref(theirs, targets, expected)
    assert torch.equal(pool.view(torch.uint8), expected)


def test_blocks_of_an_odd_size_are_refused() -> None:
    with pytest.raises(ValueError, match="6 bytes"):
        block_copy.copy_blocks_triton(torch.zeros(1, 2, 3, dtype=torch.bfloat16), integers(0), integers(1))


def random_state() -> tuple[Tensor, Tensor, Tensor]:
    """300 rows: last_token, num_computed, block_table of 9 blocks a row."""
    generator = torch.Generator().manual_seed(3)
    last_token = torch.randint(0, 50000, (300,), generator=generator)
    num_computed = torch.randint(0, 9 * 4, (300,), generator=generator, dtype=torch.int32)
    return last_token, num_computed, torch.randint(0, 10**6, (300, 9), generator=generator, dtype=torch.int32)


def some_rows(count: int) -> Tensor:
    """Distinct rows with padding among them."""
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(count))[:count].int()
    rows[1::5] = -1
    return rows


@pytest.mark.parametrize("count", [1, 257])
def test_decode_inputs(count: int) -> None:
    last_token, num_computed, block_table = random_state()
    results = []
    for run in (row_state.decode_inputs_triton, row_state.decode_inputs_ref):
        out = DecodeInputs.empty(count, torch.device("cpu"))
        run(some_rows(count), last_token, num_computed, block_table, 4, out)
        results.append([out.input_ids, out.positions, out.slot_mapping, out.context_lens])
    assert all(map(torch.equal, *results))
    if count > 1:
        assert [int(column[1]) for column in results[0]] == [0, 0, -1, 0]


@pytest.mark.parametrize("count", [1, 257])
def test_commit_tokens(count: int) -> None:
    rows, tokens = some_rows(count), torch.arange(count) - 3
    num_new = torch.arange(count, dtype=torch.int32)
    results = []
    for run in (row_state.commit_tokens_triton, row_state.commit_tokens_ref):
        last_token, num_computed, _ = random_state()
        run(rows, tokens, num_new, last_token, num_computed)
        results.append([last_token, num_computed])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("count", [1, 257])
def test_append_blocks_and_assign(count: int) -> None:
    rows, values = some_rows(count), torch.arange(count)
    results = []
    for append, assign in (
        (row_state.append_blocks_triton, row_state.assign_triton),
        (row_state.append_blocks_ref, row_state.assign_ref),
    ):
        last_token, num_computed, block_table = random_state()
        append(block_table, rows, (values % 9).int(), values.int())
        assign(last_token, rows, values)
        assign(num_computed, rows, values.int())
        results.append([last_token, num_computed, block_table])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [5, 5000])
def test_logprobs(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn((3, vocab_size + 2), generator=generator) * 4).to(dtype)[:, :vocab_size]
    logits[0, 1:4] = float("-inf")  # masked tokens
    tokens = torch.stack((logits[0].argmax(), logits[1].argmin(), torch.tensor(3)))
    ours, expected = gather_logprobs_triton(logits, tokens), gather_logprobs_ref(logits, tokens)
    assert (ours[0] - expected[0]).abs().max() <= TOLERANCE[torch.float32]
    assert torch.equal(ours[1], expected[1])


def test_the_logprob_of_a_masked_token_is_minus_infinity() -> None:
    logits = torch.tensor([[0.5, float("-inf"), 1.0]])
    logprob, rank = gather_logprobs_triton(logits, torch.tensor([1]))
    assert logprob.item() == float("-inf") and rank.item() == 3
