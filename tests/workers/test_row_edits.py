"""Allowed ids and bad words in a real runner, and the masks against a plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import NO_TOKEN, NON_FINITE
from slipring.workers.row_edits import RowEdits
from tests.workers.runner_rig import Rig
from tests.workers.tiny_models import save_tiny

PROMPT = [5, 9, 200, 31, 77]
SEEDED = {"max_tokens": 1, "temperature": 1.0, "seed": 11}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def generate(spec: ModelSpec, num_outputs: int, **params: object) -> list[int]:
    rig = Rig(spec)
    sequence = rig.admit(PROMPT, SamplingParams(**(SEEDED | params)))  # type: ignore[arg-type]
    rig.generate([sequence], num_outputs)
    return sequence.outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_ids_are_drawn(spec: ModelSpec, temperature: float) -> None:
    outputs = generate(spec, 12, allowed_token_ids=(7, 9, 250), temperature=temperature)
    assert set(outputs) <= {7, 9, 250}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_is_not_written(spec: ModelSpec, temperature: float) -> None:
    free = generate(spec, 10, temperature=temperature)
    for length in (1, 2, 3):
        word = tuple(free[4 : 4 + length])
        outputs = generate(spec, 10, temperature=temperature, bad_words=(word, (3, 4, 5, 6)))
        first = next(i for i in range(10) if tuple(free[i : i + length]) == word) + length - 1
        assert outputs[:first] == free[:first], "what comes before it stays"
        assert outputs[first] != free[first]
        assert not any(tuple(outputs[i : i + length]) == word for i in range(10))


def test_the_prompt_begins_no_bad_word(spec: ModelSpec) -> None:
    free = generate(spec, 3)
    assert generate(spec, 3, bad_words=((PROMPT[-1], free[0]),)) == free


def test_a_readmitted_row_knows_what_it_was_about_to_write(spec: ModelSpec) -> None:
    free = generate(spec, 9)
    params = SamplingParams(**SEEDED, bad_words=(tuple(free[4:7]), tuple(free[2:4])))  # type: ignore[arg-type]
    whole = generate(spec, 9, bad_words=params.bad_words)
    for num_before in range(1, 9):
        rig = Rig(spec)
        again = rig.admit(PROMPT, params, outputs=whole[:num_before])
        rig.generate([again], 9 - num_before)
        assert whole[:num_before] + again.outputs == whole


def test_a_row_that_may_draw_nothing_fails_alone(spec: ModelSpec) -> None:
    rig = Rig(spec)
    masked = SamplingParams(**SEEDED, allowed_token_ids=(7,), bad_words=((7,),))  # type: ignore[arg-type]
    bad, good = rig.admit(PROMPT, masked), rig.admit(PROMPT)
    rig.run([], [(bad, 5), (good, 5)])
    assert rig.output.num_accepted[:2].tolist() == [NO_TOKEN, 1]
    assert good.outputs == generate(spec, 1, temperature=0.0)


def test_restrictions_are_not_blamed_for_logits_that_are_not_finite(spec: ModelSpec) -> None:
    rig = Rig(spec)
    rig.model.embedding[50] = float("nan")
    masked = SamplingParams(**SEEDED, allowed_token_ids=(7,), bad_words=((7,),))  # type: ignore[arg-type]
    rows = [rig.admit([50, 4, 5], masked), rig.admit(PROMPT, masked)]
    rig.run([], [(rows[0], 3), (rows[1], 5)])
    assert rig.output.num_accepted[:2].tolist() == [NON_FINITE, NO_TOKEN]


words = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=5)


@settings(max_examples=200, deadline=None)
@given(words=words, outputs=st.lists(st.integers(0, 4), max_size=8), known=st.integers(0, 8))
def test_masks_follow_the_definition(words: list[list[int]], outputs: list[int], known: int) -> None:
    """Admitted with `known` outputs, the others drawn since: what is banned is what would end with a bad word."""
    known = min(known, len(outputs))
    table = BatchTable.create(TableShape(2, 64, 8))
    table.write_params(1, SamplingParams(max_tokens=9, bad_words=tuple(map(tuple, words))))
    table.token_ids[1, : 2 + known] = [1, 2, *outputs[:known]]
    table.num_prompt[1], table.num_known[1] = 2, 2 + known
    edits, rows = RowEdits(table, torch.from_numpy), np.array([1])
    edits.admit(1)
    for token in outputs[known:]:
        edits.count(rows, torch.tensor([token]))
    scores = torch.zeros(1, 5)
    assert edits.apply(scores, rows, np.array([len(outputs)])) == bool(words)
    ends = [[*outputs, token] for token in range(5)]
    banned = [any(end[-len(word) :] == word for word in words) for end in ends]
    assert scores[0].isneginf().tolist() == banned
