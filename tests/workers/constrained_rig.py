"""A rig whose rows can be bound to grammars: random weights, one token a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from llguidance import LLMatcher

from slipring.shm.control import BuildGrammar, GrammarBuilt, LoadTokenizer
from slipring.shm.grammar import Grammar
from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from tests.byte_tokenizer import EOS, byte_tokenizer
from tests.workers.runner_rig import Rig, Sequence
from tests.workers.tiny_models import save_tiny

PROMPT = [72, 105, 33]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]+$"},
        "n": {"type": "integer", "minimum": 3, "maximum": 400},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
AnyRig = TypeVar("AnyRig", bound=Rig)


def byte_spec(path: Path) -> ModelSpec:
    return msgspec.structs.replace(save_tiny("llama", path)[0], eos_token_ids=(EOS,))


def json_grammar(schema: Any) -> Grammar:
    return Grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False}), "")


def with_grammars(rig: AnyRig, *grammars: Grammar) -> AnyRig:
    """They have ids 1, 2, ..."""
    rig.grammars.handle(LoadTokenizer(byte_tokenizer().to_str().encode()))
    for grammar_id, grammar in enumerate(grammars, 1):
        assert rig.grammars.handle(BuildGrammar(grammar_id, grammar)) == GrammarBuilt(grammar_id)
    return rig


def constrained(seed: int = 0, **changes: Any) -> SamplingParams:
    values = {"max_tokens": 1, "temperature": 1.0, "seed": seed, "grammar": 1, "stop_token_ids": (EOS,)}
    return SamplingParams(**(values | changes))


def run_to_the_end(rig: Rig, sequences: list[Sequence], most: int = 60) -> None:
    """Each until its end of sequence."""
    for _ in range(most):
        waiting = [s for s in sequences if EOS not in s.outputs]
        if not waiting:
            return
        decode = [s for s in waiting if not s.new]
        rig.run(decode, [(s, len(s.tokens) - s.num_computed) for s in waiting if s.new])


def text(sequence: Sequence) -> str:
    return bytes(token for token in sequence.outputs if token < 256).decode()
