"""Logits of each family against transformers on tiny random weights, through our loader and our paged pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.runner_rig import Rig
from tests.workers.tiny_models import FAMILIES, save_tiny

# Largest absolute difference of logits whose standard deviation is about 10.
TOLERANCE = {"float32": 5e-4}


def logits_of(rig: Rig, prompt: list[int]) -> torch.Tensor:
    """Logits at the prompt's end, caught on their way to the sampler."""
    caught: list[torch.Tensor] = []
    sample = rig.runner.sampler.sample

    def catch(logits, *rest):
        caught.append(logits.float().clone())
        return sample(logits, *rest)

    rig.runner.sampler.sample = catch
    rig.run([], [(rig.admit(prompt), len(prompt))])
    rig.runner.sampler.sample = sample
    return caught[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    spec, reference = save_tiny(family, tmp_path)
    rig = Rig(spec)
    prompt = torch.randint(3, spec.vocab_size, (90,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(prompt.unsqueeze(0)).logits[0]
    for length in (1, 7, 8, 33, 90):
        ours = logits_of(rig, prompt[:length].tolist())
        assert (ours - expected[length - 1]).abs().max() < TOLERANCE["float32"], length


def test_a_sharded_directory_loads_like_a_single_file(tmp_path: Path) -> None:
    spec, reference = save_tiny("qwen3", tmp_path, max_shard_size="100KB")
    assert len(spec.files) > 2
    prompt = list(range(5, 30))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    assert (logits_of(Rig(spec), prompt) - expected).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_fp32(dtype: str, tmp_path: Path) -> None:
    spec, _ = save_tiny("llama", tmp_path)
    prompt = list(range(5, 45))
    full = logits_of(Rig(spec), prompt)
    half = logits_of(Rig(spec, dtype=dtype), prompt)
    assert torch.nn.functional.cosine_similarity(full, half, dim=0) > 0.995
