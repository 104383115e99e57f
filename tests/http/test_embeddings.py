"""Embeddings over the double, whose hidden state is a prompt's first four ids."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.http.calls import call, make_api, refused, value
from tests.http.engine_double import VOCAB, EngineDouble

EMBEDDINGS = "/v1/embeddings"


def embed(body: dict[str, Any], engine: EngineDouble | None = None) -> Any:
    response = call(make_api(engine), "POST", EMBEDDINGS, body)
    assert response.status == 200, response.body
    return value(response)


def unit(*numbers: float) -> list[float]:
    return (np.array(numbers) / np.linalg.norm(numbers)).tolist()


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_inputs_of_every_shape(given: Any, ids: list[list[int]]) -> None:
    engine = EngineDouble()
    answer = embed({"input": given, "model": "m"}, engine)
    assert [list(request.prompt_token_ids) for request in engine.requests] == ids
    assert all((r.params.max_tokens, r.params.embedding_size) == (0, 4) for r in engine.requests)
    assert answer["object"] == "list" and answer["model"] == "m"
    num = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": num, "total_tokens": num}
    for index, (item, prompt) in enumerate(zip(answer["data"], ids, strict=True)):
        assert (item["object"], item["index"]) == ("embedding", index)
        np.testing.assert_allclose(item["embedding"], unit(*[*prompt, 0, 0, 0][:4]), rtol=1e-6)


def test_base64_is_the_same_in_little_endian_float32() -> None:
    plain = embed({"input": [3, 1, 4, 1]})["data"][0]["embedding"]
    packed = embed({"input": [3, 1, 4, 1], "encoding_format": "base64"})["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.array(plain, np.float32))


def test_dimensions_cut_and_scale_again() -> None:
    found = embed({"input": [3, 4, 9, 9], "dimensions": 2})["data"][0]["embedding"]
    np.testing.assert_allclose(found, unit(3, 4), rtol=1e-6)


def test_the_end_of_a_text_is_cut_and_it_may_fill_the_context() -> None:
    engine = EngineDouble()
    embed({"input": "abcdef", "truncate_prompt_tokens": 2}, engine)
    embed({"input": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": "left"}, engine)
    embed({"input": "x" * 900, "truncate_prompt_tokens": -1}, engine)
    embed({"input": "x" * 200}, engine)
    assert [bytes(list(r.prompt_token_ids)) for r in engine.requests] == [b"ab", b"ef", b"x" * 200, b"x" * 200]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"), ({"input": [VOCAB]}, "input"), ({"input": "x" * 201}, "input"),
        ({"input": ["x"] * 2049}, "input"), ({"encoding_format": "bytes"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"), ({"dimensions": 5}, "dimensions"), ({"dimensions": True}, "dimensions"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"), ({"cache_salt": ""}, "cache_salt"),
    ],
)  # fmt: skip
def test_refusals(fields: dict[str, Any], param: str) -> None:
    engine = EngineDouble()
    assert refused(call(make_api(engine), "POST", EMBEDDINGS, {"input": "x", **fields}))["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"])
def test_what_a_generating_model_cannot_do_is_said(path: str) -> None:
    error = refused(call(make_api(), "POST", path, {}), 404)
    assert "/v1/embeddings" in error["message"]
