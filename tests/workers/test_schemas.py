"""200 random schemas: every document that the masks allow is valid, or the schema is refused."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from slipring.runtime.grammar import GrammarCompiler, GrammarSpec
from slipring.runtime.model import open_model
from slipring.runtime.request import InvalidRequestError
from slipring.shm.control import BuildGrammar, GrammarBuilt, LoadTokenizer
from slipring.workers.grammar import GrammarStore, num_mask_words
from tests.random_schemas import random_schema

NUM_SCHEMAS = 200
MOST_TOKENS = 600


@pytest.fixture(scope="module")
def parts() -> tuple[GrammarCompiler, GrammarStore, object]:
    model = open_model("smollm2")
    store = GrammarStore(model.spec)
    store.handle(LoadTokenizer(model.tokenizer().document))
    return GrammarCompiler(model.spec), store, model


def write(store: GrammarStore, model, grammar_id: int, chance: random.Random) -> str:
    """A document drawn by dice, which mostly end what can end."""
    matcher, tokens = store.matcher(grammar_id), []
    closers = [model.tokenizer().encode(text)[0] for text in ('"', "}", "]", "@", "a", "1")]
    mask = np.zeros(num_mask_words(model.spec.vocab_size), np.int32)
    for _ in range(MOST_TOKENS):
        matcher.fill(mask)
        assert matcher.error is None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ends = [token for token in model.spec.eos_token_ids if token in allowed]
        # Strings without bounds must end some time.
        closing = [token for token in closers if token in allowed] if chance.random() < 0.5 else []
        token = ends[0] if ends and chance.random() < 0.7 else int(chance.choice(closing or allowed.tolist()))
        if token in ends:
            return model.tokenizer().decode(tokens, skip_special_tokens=False)
        tokens.append(token)
        matcher.accept([token])
    raise AssertionError("the document does not end")


def test_all_documents_are_valid(parts) -> None:
    compiler, store, model = parts
    num_refused = 0
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(seed)
        try:
            spec = GrammarSpec("json_schema", json.dumps(schema))
            grammar = asyncio.run(compiler.compile(spec, "schema", model.tokenizer()))
        except InvalidRequestError:
            num_refused += 1
            continue
        assert store.handle(BuildGrammar(seed + 1, grammar)) == GrammarBuilt(seed + 1)
        for _ in range(2):
            text = write(store, model, seed + 1, random.Random(seed))
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    assert num_refused < NUM_SCHEMAS // 2


def documents(parts, grammar_id: int, schema: Any, num: int = 12) -> list[str]:
    compiler, store, model = parts
    spec = GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))
    grammar = asyncio.run(compiler.compile(spec, "schema", model.tokenizer()))
    assert store.handle(BuildGrammar(grammar_id, grammar)) == GrammarBuilt(grammar_id)
    return [write(store, model, grammar_id, random.Random(seed)) for seed in range(num)]


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "pattern": pattern, "maxLength": 20} for pattern in (
            r"\S", "b", "^a", "z$", "^[a-z]+$", "", "^[😀-🙏]{2}$",
        )),
        {"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 5},
        {"type": "string", "format": "date", "maxLength": 10},
        {"type": "integer", "minimum": 3, "maximum": 5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "boolean"}},
        {"enum": ["开", "关"]},
        {"const": "😀"},
        {"type": "object", "properties": {"名": {"const": 1}}, "required": ["名"], "additionalProperties": False},
        {"enum": ['a"b\\c\n', " "]},
        {"enum": [1, 1.5, None, True, {"a": [1]}]},
    ],
    ids=lambda schema: json.dumps(schema)[:50],
)  # fmt: skip
def test_what_is_asked_in_two_ways_at_once_or_not_in_ascii(parts, schema: Any) -> None:
    """Patterns are searched for, as JSON Schema says; bounds hold beside them."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for text in documents(parts, NUM_SCHEMAS + 1, schema):
        validator.validate(json.loads(text))


def test_blanks_between_tokens_are_bounded(parts) -> None:
    _, store, model = parts
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False, "type": "object"}
    documents(parts, NUM_SCHEMAS + 2, schema, num=1)
    matcher, text = store.matcher(NUM_SCHEMAS + 2), ""
    blanks = [token for token in range(model.spec.vocab_size) if model.tokenizer().token_bytes(token).isspace()]
    mask = np.zeros(num_mask_words(model.spec.vocab_size), np.int32)
    while not text.rstrip().endswith("}"):
        matcher.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        liked = [token for token in blanks if bits[token]] or np.flatnonzero(bits).tolist()
        matcher.accept(liked[:1])
        text += model.tokenizer().decode(liked[:1])
        assert len(text) < 400
    assert json.loads(text) == {"a": 1} and max(map(len, re.findall(r"\s+", text))) <= 21
