"""The masking kernel equals its reference, whatever the width; a constrained row's tokens equal the CPU worker's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipring.kernels.token_mask import apply_token_mask_ref, apply_token_mask_triton
from tests.kernels.on_gpu import GpuRig
from tests.workers.constrained_rig import (
    PROMPT,
    SCHEMA,
    byte_spec,
    constrained,
    json_grammar,
    run_to_the_end,
    text,
    with_grammars,
)
from tests.workers.runner_rig import GREEDY, Rig

SMALL: dict[str, object] = {"max_num_seqs": 5, "num_rows": 9}


@pytest.mark.parametrize("width", [1, 31, 260, 2049])
def test_kernel_equals_reference(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn((5, width), generator=generator)
    at = torch.tensor([4, 0, 2])
    allowed = torch.randint(-(2**31), 2**31, (3, -(-width // 32)), generator=generator).int()
    ours, theirs = scores.clone(), scores.clone()
    apply_token_mask_triton(ours, at, allowed)
    apply_token_mask_ref(theirs, at, allowed)
    assert torch.equal(ours, theirs) and torch.equal(ours[1], scores[1])


def test_constrained_rows_on_the_gpu_path(tmp_path: Path) -> None:
    spec, outputs = byte_spec(tmp_path), []
    for rig in (GpuRig(spec, **SMALL), Rig(spec, **SMALL)):
        with_grammars(rig, json_grammar(SCHEMA))
        rows = [rig.admit(PROMPT, constrained(3)), rig.admit(PROMPT, GREEDY)]
        run_to_the_end(rig, rows, most=30)
        outputs.append([row.outputs for row in rows])
    assert outputs[0] == outputs[1] and text(rows[0]).startswith("{")
