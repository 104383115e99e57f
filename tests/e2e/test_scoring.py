"""What evaluation harnesses and embedding clients send, against the real model."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import requests

from tests.serving import alive

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. " * 3


def post(server: str, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(server + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_evaluation_harness_scores_continuations(server: str) -> None:
    """Batches of token ids, echo, one token more: the likely ending scores higher, however the cache stands."""

    def ids(text: str) -> list[int]:
        return post(server, "/tokenize", {"prompt": text})["tokens"]

    context = ids(TEXT + "The capital of France is")
    endings = [ids(" Paris"), ids(" banana")]
    body = {
        "prompt": [context + ending for ending in endings], "max_tokens": 1, "temperature": 0, "logprobs": 1,
        "echo": True, "seed": 1,
    }  # fmt: skip
    runs = [post(server, "/v1/completions", body)["choices"] for _ in range(2)]
    scores = []
    for choice, ending in zip(runs[0], endings, strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(context) + len(ending) + 1 and found["token_logprobs"][0] is None
        values, tops = found["token_logprobs"][len(context) : -1], found["top_logprobs"][len(context) : -1]
        scores.append(sum(values))
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert greedy == (ending == endings[0])
    assert scores[0] > scores[1] + 5
    for cold, warm in zip(*runs, strict=True):
        for a, b in zip(cold["logprobs"]["token_logprobs"][1:], warm["logprobs"]["token_logprobs"][1:], strict=True):
            assert math.isclose(a, b, abs_tol=1e-4), "a warm prefix cache changes nothing"
    alive(server)


def test_generated_tokens_score_as_they_did_when_drawn(server: str) -> None:
    model = post(server, "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0,
                                             "logprobs": 0, "return_token_ids": True})["choices"][0]  # fmt: skip
    whole = model["prompt_token_ids"] + model["token_ids"]
    scored = post(server, "/v1/completions", {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 0,
                                              "prompt_logprobs": 2})  # fmt: skip
    (choice,), usage = scored["choices"], scored["usage"]
    assert usage["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    again = choice["logprobs"]["token_logprobs"][-len(model["token_ids"]) :]
    assert again == pytest.approx(model["logprobs"]["token_logprobs"], abs=1e-3)
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(whole)
    for token, entry in zip(whole[1:], choice["prompt_logprobs"][1:], strict=True):
        assert str(token) in entry and 2 <= len(entry) <= 3


def test_embeddings_by_the_sdk(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="x", max_retries=0)
    texts = ["The cat sat on the mat.", "The cat sat on the mat.", "Quarterly revenue rose by nine percent."]
    found = client.embeddings.create(model="smollm2", input=texts)  # base64 underneath
    vectors = [item.embedding for item in found.data]
    plain = client.embeddings.create(model="smollm2", input=texts, encoding_format="float")
    assert plain.data[2].embedding == pytest.approx(vectors[2], abs=1e-4)
    dot = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
    assert dot[:2] == pytest.approx([1, 1], abs=1e-4) and dot[2] < 0.99
    short = client.embeddings.create(model="smollm2", input=texts[0], dimensions=64).data[0].embedding
    assert len(short) == 64 and sum(x * x for x in short) == pytest.approx(1, abs=1e-5)
    alive(server)


def test_words_are_kept_out(server: str) -> None:
    body = {"prompt": TEXT + "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert "Paris" in post(server, "/v1/completions", body)["choices"][0]["text"]
    assert "Paris" not in post(server, "/v1/completions", body | {"bad_words": ["Paris"]})["choices"][0]["text"]
