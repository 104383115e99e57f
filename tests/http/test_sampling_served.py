"""What is drawn and what is told of it, by a real server over HTTP: temperatures, seeds, ends, log-probabilities,
salts, and text whose characters lie across tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.http.calls import CHAT, COMPLETIONS
from tests.serving import alive, server_at

HI = [{"role": "user", "content": "Say hello."}]
EOS = 2
EMOJI = "😉“中 é👨‍👩‍👧"


@pytest.fixture(autouse=True, scope="module")
def unharmed(server: str) -> Iterator[None]:
    yield
    alive(server)


def post(server: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, which must be JSON as the standard has it: without NaN and infinities."""
    answer = requests.post(server + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.content.decode("utf-8"), parse_constant=lambda name: pytest.fail(name))


def chat(server: str, **more: Any) -> dict[str, Any]:
    return post(server, CHAT, {"messages": HI, "temperature": 0, "max_tokens": 12, **more})["choices"][0]


def streamed(server: str, **more: Any) -> tuple[list[dict[str, Any]], str]:
    """Choices of the chunks, and their text; every line is UTF-8."""
    body = {"messages": HI, "temperature": 0, "max_tokens": 12, **more, "stream": True}
    data = requests.post(server + CHAT, json=body, timeout=120).content.decode("utf-8")
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return choices, "".join(choice["delta"].get("content") or "" for choice in choices)


def forced(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 5e-324])
def test_tiny_temperatures_are_greedy(server: str, temperature: float) -> None:
    body = {"prompt": "1, 2, 3, 4, 5, 6,", "max_tokens": 8, "seed": 1}
    drawn, greedy = (post(server, COMPLETIONS, {**body, "temperature": t})["choices"] for t in (temperature, 0))
    assert drawn == greedy


def test_a_seed_draws_the_same_in_any_company(server: str) -> None:
    def drawn(seed: int | None, **more: Any) -> str:
        return chat(server, temperature=0.8, seed=seed, **more)["message"]["content"]

    alone = drawn(42, max_tokens=20)
    with ThreadPoolExecutor(8) as pool:
        for seeds in ((None, 7), (None,) * 5, (3, 4, 5, 6, 42)):
            neighbours = [pool.submit(drawn, seed, max_tokens=24) for seed in seeds]
            again = pool.submit(drawn, 42, max_tokens=20)
            later = [pool.submit(drawn, None, max_tokens=6) for _ in range(2)]
            assert again.result() == alone
            assert all(future.result() for future in (*neighbours, *later))


def test_seeds_differ_when_they_run_at_once(server: str) -> None:
    body = {"prompt": "Once upon a time", "temperature": 1.5, "max_tokens": 16}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda seed: post(server, COMPLETIONS, {**body, "seed": seed}), range(1, 17)))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 16


def test_equal_prompts_of_a_batch_under_one_seed(server: str) -> None:
    """Each prompt is drawn as if it were alone."""
    body = {"temperature": 1, "seed": 5, "max_tokens": 12}
    both = [choice["text"] for choice in post(server, COMPLETIONS, {**body, "prompt": ["hi", "hi"]})["choices"]]
    alone = post(server, COMPLETIONS, {**body, "prompt": "hi"})["choices"][0]["text"]
    assert both == [alone, alone]


def test_the_end_is_put_off_for_min_tokens_and_no_longer(server: str) -> None:
    body = {"messages": HI, "logit_bias": {str(EOS): 100}, "min_tokens": 8, "max_tokens": 30, "temperature": 0}
    answer = post(server, CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8 + 1, "the end itself is a token"


@pytest.mark.parametrize(
    "more",
    [
        {"top_logprobs": 20, **forced({"type": "boolean"})},
        {"top_logprobs": 5, "logit_bias": {"5": 100}, "max_tokens": 3},
        {"top_logprobs": 5, "allowed_token_ids": [100], "max_tokens": 3},
        {"top_logprobs": 5, "temperature": 1, "top_k": 1, "max_tokens": 3},
        {"top_logprobs": 5, "min_tokens": 3, "max_tokens": 3},
    ],
)
def test_what_cannot_be_drawn_breaks_no_json(server: str, more: dict[str, Any]) -> None:
    content = chat(server, logprobs=True, **more)["logprobs"]["content"]
    assert content and all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) >= 5 for entry in content)
    body = {"prompt": "hi", "echo": True, "logprobs": 5, "temperature": 1, "top_k": 1, "max_tokens": 4}
    assert post(server, COMPLETIONS, body)["choices"][0]["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("param", "value"), [("allowed_token_ids", [5]), ("bad_words", ["ab", "a", "b"])])
def test_restrictions_that_leave_no_token_are_the_requests_own_mistake(
    server: str, param: str, value: list[Any], stream: bool
) -> None:
    body = {"messages": HI, "guided_regex": "ab", "max_tokens": 5, param: value, "stream": stream}
    answer = requests.post(server + CHAT, json=body, timeout=120)
    error = json.loads(answer.content.removeprefix(b"data: "))["error"]
    assert answer.status_code == (200 if stream else 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param and "left no token" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_tokens_join_to_the_text(server: str, stream: bool) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 60, **forced({"const": EMOJI})}
    choices, text = streamed(server, **asked) if stream else ([chat(server, **asked)], "")
    text = text or choices[0]["message"]["content"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    written = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert written.decode() == text and json.loads(text) == EMOJI
    alternatives = [bytes(top["bytes"]) for entry in entries for top in entry["top_logprobs"]]
    assert not any("\ufffd".encode() in data for data in alternatives), "each is what it is, decoded alone"


def test_an_answer_cut_inside_a_character_is_the_same_in_both_modes(server: str) -> None:
    cut = 0
    for max_tokens in range(2, 9):
        asked = {"max_tokens": max_tokens, **forced({"const": EMOJI})}
        plain = chat(server, **asked)
        choices, text = streamed(server, **asked)
        assert text == plain["message"]["content"] and choices[-1]["finish_reason"] == plain["finish_reason"]
        assert all("\ufffd" not in (choice["delta"].get("content") or "") for choice in choices[:-1])
        cut += text.endswith("\ufffd")
    assert cut, "some cut fell into a character"


def test_a_salt_keeps_what_is_cached_to_itself(server: str) -> None:
    prompt = server_at(server).post("/tokenize", {"prompt": "a salted lighthouse by the sea " * 12})["tokens"]

    def cached(**more: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
        return post(server, COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="s1") == 0 and (hit := cached(cache_salt="s1")) > 0
    assert cached(cache_salt="s2") == cached() == cached(cache_salt="smollm2") == 0
    assert cached() == cached(cache_salt="s2") == hit
    for salt in (5, ["s"], {}, True):
        assert requests.post(server + COMPLETIONS, json={"prompt": "x", "cache_salt": salt}).status_code == 400
