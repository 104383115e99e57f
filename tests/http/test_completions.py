"""Text completions over the double."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.calls import COMPLETIONS, call, events, make_api, refused, stream_bytes, value
from tests.http.engine_double import VOCAB, EngineDouble


def complete(body: dict[str, Any], engine: EngineDouble | None = None) -> Any:
    response = call(make_api(engine), "POST", COMPLETIONS, body)
    assert response.status == 200, response.body
    return value(response)


@pytest.mark.parametrize(
    "prompt",
    [
        None, "", [], [[]], [""], ["a", ""], [-1], [[-1]], [VOCAB], [4611686018427387905], [1 << 70], [True, False],
        [1.5], [1, "a"], [[1], ["a"]], [[1], 2], ["a", [1]], {"a": 1}, 5, [None], [[[1]]],
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_none(prompt: Any, stream: bool) -> None:
    engine = EngineDouble()
    error = refused(call(make_api(engine), "POST", COMPLETIONS, {"prompt": prompt, "stream": stream}))
    assert error["param"].startswith("prompt") and engine.sinks == {}


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_of_every_shape(prompt: Any, sent: list[list[int]]) -> None:
    engine = EngineDouble()
    answer = complete({"prompt": prompt, "max_tokens": 2}, engine)
    assert [list(request.prompt_token_ids) for request in engine.requests] == sent
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(sent)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))


def test_an_answer() -> None:
    answer = complete({"prompt": "x", "max_tokens": 3})
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "Hel", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_by_prompt_then_sample(stream: bool) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 2}
    if stream:
        texts = ["", "", "", ""]
        for event in events(stream_bytes(make_api(), COMPLETIONS, body))[:-1]:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in complete(body)["choices"]]
    assert texts == ["aHe", "aHe", "bHe", "bHe"]


def test_usage_counts_each_prompt_once_and_every_choice() -> None:
    usage = complete({"prompt": ["aa", "b"], "n": 3, "max_tokens": 2})["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)


@pytest.mark.parametrize("prompt", ["Verdict: no", list(b"Verdict: no")])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_generates_nothing(prompt: Any, stream: bool) -> None:
    engine = EngineDouble()
    body = {"prompt": prompt, "echo": True, "max_tokens": 0}
    if stream:
        (event, done) = events(stream_bytes(make_api(engine), COMPLETIONS, body))
        choice = event["choices"][0]
        assert done == "[DONE]"
    else:
        answer = complete(body, engine)
        choice = answer["choices"][0]
        assert answer["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == ("Verdict: no", "length")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": ["x"] * 2049}, "prompt"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    assert refused(call(make_api(), "POST", COMPLETIONS, {"prompt": "x", **fields}))["param"] == param


@pytest.mark.parametrize(("length", "fits"), [(199, True), (200, False), (201, False)])
def test_the_context_must_leave_room_for_one_token(length: int, fits: bool) -> None:
    response = call(make_api(), "POST", COMPLETIONS, {"prompt": [1] * length, "max_tokens": 5})
    if fits:
        assert value(response)["usage"]["completion_tokens"] == 1
        return
    error = refused(response)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert "200" in error["message"] and str(length) in error["message"]


def test_echo_needs_no_room() -> None:
    assert complete({"prompt": [97] * 200, "max_tokens": 0, "echo": True})["choices"][0]["text"] == "a" * 200
    refused(call(make_api(), "POST", COMPLETIONS, {"prompt": [97] * 201, "max_tokens": 0, "echo": True}))


def test_logprobs() -> None:
    found = complete({"prompt": "x", "max_tokens": 2, "logprobs": 2})["choices"][0]["logprobs"]
    assert found["tokens"] == ["H", "e"] and found["text_offset"] == [0, 1] and found["token_logprobs"] == [-0.5, -0.5]
    assert [len(top) for top in found["top_logprobs"]] == [2, 2]
    sampled = complete({"prompt": "x", "max_tokens": 1, "logprobs": 0})["choices"][0]["logprobs"]
    assert sampled["top_logprobs"] == [{"H": -0.5}]


def test_streamed_logprobs_join_to_the_plain_ones() -> None:
    body = {"prompt": "x", "max_tokens": 4, "logprobs": 1}
    joined: dict[str, list[Any]] = {}
    for event in events(stream_bytes(make_api(), COMPLETIONS, body))[:-1]:
        for key, values in event["choices"][0]["logprobs"].items():
            joined.setdefault(key, []).extend(values)
    assert joined == complete(body)["choices"][0]["logprobs"]
