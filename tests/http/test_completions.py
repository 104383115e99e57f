"""Text completions over the double."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slipring.runtime.request import Delta, TokenLogprob
from tests.http.calls import COMPLETIONS, acall, call, events, make_api, refused, stream_bytes, value
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
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
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


@pytest.mark.parametrize("prompt", ["Verdict: no", list(b"Verdict: no")])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(prompt: Any, stream: bool, max_tokens: int) -> None:
    engine = EngineDouble()
    body = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": 1}
    if stream:
        chunks = [event["choices"][0] for event in events(stream_bytes(make_api(engine), COMPLETIONS, body))[:-1]]
        text = "".join(chunk["text"] for chunk in chunks)
        found = {name: [x for c in chunks for x in c["logprobs"][name]] for name in chunks[0]["logprobs"]}
    else:
        answer = complete(body, engine)
        assert answer["usage"]["completion_tokens"] == max_tokens
        text, found = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    num = len(b"Verdict: no") + max_tokens
    assert text == "Verdict: no" + "He"[:max_tokens] == "".join(found["tokens"])
    assert found["token_logprobs"] == [None, *[-0.25] * 10, *[-0.5] * max_tokens]
    assert found["top_logprobs"][:2] == [None, {" ": -0.125, "e": -0.25}] and len(found["top_logprobs"]) == num
    assert found["text_offset"] == list(range(num))


def test_scoring_needs_no_room_behind_the_prompt() -> None:
    body = {"prompt": [97] * 200, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert len(complete(body)["choices"][0]["logprobs"]["tokens"]) == 200
    refused(call(make_api(), "POST", COMPLETIONS, body | {"prompt": [97] * 201}))


def test_prompt_logprobs_stand_by_token_id() -> None:
    engine = EngineDouble()
    answer = complete({"prompt": ["ab", "c"], "max_tokens": 1, "prompt_logprobs": 1}, engine)
    assert [request.params.prompt_logprobs for request in engine.requests] == [1, 1]
    itself = {"logprob": -0.25, "rank": 2, "decoded_token": "b"}
    likelier = {"logprob": -0.125, "rank": 1, "decoded_token": " "}
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [[None, {"98": itself, "32": likelier}], [None]]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_told(stream: bool) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 2, "return_token_ids": True}
    if stream:
        chunks = [event["choices"][0] for event in events(stream_bytes(make_api(), COMPLETIONS, body))[:-1]]
        prompts = {chunk["index"]: chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk}
        outputs = [[i for c in chunks if c["index"] == index for i in c["token_ids"]] for index in range(2)]
    else:
        choices = complete(body)["choices"]
        prompts = {choice["index"]: choice["prompt_token_ids"] for choice in choices}
        outputs = [choice["token_ids"] for choice in choices]
    assert prompts == {0: [97, 98], 1: [99]} and outputs == [list(b"He")] * 2
    assert "token_ids" not in complete({"prompt": "ab", "max_tokens": 2})["choices"][0]


def test_tokens_may_be_named_by_id() -> None:
    body = {"prompt": "x", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    found = complete(body)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:72", "token_id:101"] and list(found["top_logprobs"][0]) == ["token_id:72"]


@pytest.mark.parametrize(
    ("fields", "sent", "echo"),
    [
        ({"truncate_prompt_tokens": 3}, b"efg", "efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc", "abc"),
        ({"truncate_prompt_tokens": 30}, b"abcdefg", "abcdefg"),
        ({"truncate_prompt_tokens": -1}, b"abcdefg", "abcdefg"),
    ],
)
@pytest.mark.parametrize("prompt", ["abcdefg", list(b"abcdefg")])
def test_prompts_are_cut(fields: dict[str, Any], sent: bytes, echo: str, prompt: Any) -> None:
    engine = EngineDouble()
    answer = complete({"prompt": prompt, "max_tokens": 1, "echo": True, **fields}, engine)
    assert bytes(list(engine.requests[0].prompt_token_ids)) == sent and answer["usage"]["prompt_tokens"] == len(sent)
    assert answer["choices"][0]["text"] == echo + "H"


def test_a_prompt_is_cut_to_the_context() -> None:
    engine = EngineDouble()
    complete({"prompt": "x" * 1000, "max_tokens": 50, "truncate_prompt_tokens": -1}, engine)
    complete({"prompt": "x" * 1000, "max_tokens": 10**6, "truncate_prompt_tokens": -1}, engine)
    assert [len(request.prompt_token_ids) for request in engine.requests] == [150, 100]


def test_the_best_of_several_are_told() -> None:
    async def main() -> Any:
        engine = EngineDouble(script=None)
        body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 5}
        answering = asyncio.ensure_future(acall(make_api(engine), "POST", COMPLETIONS, body))
        while len(engine.requests) < 2:
            await asyncio.sleep(0)
        assert [(r.n, r.params.logprobs) for r in engine.requests] == [(3, 0)] * 2
        for position in range(2):
            for index, logprob in enumerate((-2.0, -0.5, -1.0)):
                entry = TokenLogprob(65 + index, logprob, 1, ())
                delta = Delta(index=index, text="ABC"[index], token_ids=(65 + index,), logprobs=(entry,))
                delta.finish_reason = "length"
                engine._push(position, delta)
        return value(await answering)

    answer = asyncio.run(main())
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, "B", None), (1, "C", None), (2, "B", None), (3, "C", None)
    ]  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 6, "what was computed is counted"
