"""Philox against Random123's vectors, filters against a plain definition, draws against their distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.kernels import sampling
from slipring.kernels.philox import gumbel_ref, noise_for_tokens, noise_for_vocab, philox4x32_ref
from slipring.kernels.sampling import DrawParams, apply_penalties, cutoff_ref, draw

# Random123, tests/kat_vectors: "philox4x32 10 <counter x4> <key x2> <result x4>".
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("given_words", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(given_words: str, expected: str) -> None:
    words = [torch.tensor(int(word, 16)) for word in given_words.split()]
    result = philox4x32_ref((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert " ".join(f"{int(word):08x}" for word in result) == expected


def keys(num_rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    return {
        "seed": torch.from_numpy(random.integers(0, 2**32, (num_rows, 2))),
        "position": torch.from_numpy(random.integers(0, 9000, num_rows)),
        "choice": torch.from_numpy(random.integers(0, 3, num_rows)),
    }


def params(num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> DrawParams:
    return DrawParams(
        temperature=torch.ones(num_rows),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        **keys(num_rows, seed),
    )


def test_noise_of_a_token_does_not_depend_on_how_it_is_asked_for() -> None:
    key = keys(3)
    whole = noise_for_vocab(1001, **key)
    some = torch.tensor([[1000, 0, 7], [5, 5, 6], [3, 999, 4]])
    assert torch.equal(noise_for_tokens(some, **key), whole.gather(1, some))
    assert not torch.equal(whole, noise_for_vocab(1001, **(key | {"choice": key["choice"] + 1})))
    assert not torch.equal(whole, noise_for_vocab(1001, **(key | {"position": key["position"] + 1})))


def test_noise_is_finite_and_standard_gumbel() -> None:
    assert torch.isfinite(gumbel_ref(torch.tensor([0, 1, 2**31, 2**32 - 1]))).all()
    noise = noise_for_vocab(400_000, **keys(1))[0].double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(np.pi**2 / 6, abs=0.03)


def plainly_kept(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, for scores without ties: min_p, top_k, then top_p on what is left, renormalised."""
    probs = np.exp(scores - scores.max())
    kept = probs >= min_p
    if top_k:
        kept &= scores >= np.sort(scores)[::-1][min(top_k, len(scores)) - 1]
    order = [i for i in np.argsort(-scores) if kept[i]]
    left = probs[order] / probs[order].sum()
    before = np.cumsum(left) - left
    return {int(i) for i, mass in zip(order, before, strict=True) if mass < top_p or top_p == 1.0}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 2, 5, 300, 5000]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.sampled_from([0.05, 1.0, 6.0]),
)
def test_filters_keep_what_the_definition_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    scores = torch.from_numpy(np.random.default_rng(seed).normal(0, spread, 700).astype(np.float32)).unsqueeze(0)
    p = params(1, top_k, top_p, min_p)
    ordered = scores.sort(descending=True).values
    cutoff = cutoff_ref(ordered, scores.logsumexp(1), p.top_k, p.top_p, p.min_p, whole=True)
    kept = set(torch.nonzero(scores[0] >= cutoff).flatten().tolist())
    expected = plainly_kept(scores[0].double().numpy(), top_k, top_p, min_p)
    assert len(kept ^ expected) <= 1, "one token at a rounded boundary may differ"
    noisy = noise_for_vocab(700, p.seed, p.position, p.choice) + scores
    best = max(kept, key=lambda token: float(noisy[0, token]))
    assert draw(scores, p).tolist() == [best]


def test_narrow_and_wide_paths_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(3)) * 4
    p = params(40, top_p=0.9)
    narrow = draw(logits, p)
    monkeypatch.setattr(sampling, "NUM_CANDIDATES", 1)
    assert torch.equal(draw(logits, p), narrow)


def test_neighbours_change_nothing() -> None:
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(3)) * 3
    p = params(12, seed=4)
    p.top_k[::3], p.top_p[1::3] = 7, 0.8
    together = draw(logits, p)
    for row in range(12):
        one = torch.tensor([row])
        assert draw(logits[one], p.take(one)) == together[row]


def test_draws_follow_the_distribution() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])
    num = 20_000
    p = params(num)
    p.position[:] = torch.arange(num)
    p.seed[:] = torch.tensor([123, 456])
    share = torch.bincount(draw(scores.expand(num, -1), p), minlength=5) / num
    assert (share - scores.softmax(0)).abs().max() < 0.012


def test_penalties_are_vllms() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    prompt_mask = torch.tensor([[True, True, False, False]])
    counts = torch.tensor([[0, 0, 3, 0]], dtype=torch.int32)
    apply_penalties(logits, prompt_mask, counts, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.1]))
    torch.testing.assert_close(logits, torch.tensor([[1.0, -4.0, 0.5 - 0.3 - 0.5, 1.0]]))
