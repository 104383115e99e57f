"""200 random schemas: every document that the masks allow is valid, or the schema is refused."""

from __future__ import annotations

import asyncio
import json
import random

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
