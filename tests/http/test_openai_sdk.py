"""The official OpenAI client against a real server."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

OCEAN: Any = [{"role": "user", "content": "Write one sentence about the ocean."}]


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="DUMMY_KEY", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(client: openai.OpenAI, model: str, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": OCEAN, "temperature": 0, **more})


def post(client: openai.OpenAI, path: str, body: dict[str, Any]) -> Any:
    return client.post(path, body=body, cast_to=object)


def streamed(client: openai.OpenAI, model: str, **more: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Text and finish reason by choice, and the usage."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    usage = None
    options = {"include_usage": True}
    for chunk in ask(client, model, stream=True, stream_options=options, **more):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing follows a finish reason"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends, usage


def gauge(server: str, name: str) -> float:
    text = urllib.request.urlopen(f"{server}/metrics").read().decode()
    return next(f for f in text_string_to_metric_families(text) if f.name == name).samples[0].value


def test_models(client: openai.OpenAI, model: str) -> None:
    found = client.models.retrieve(model)
    assert found.id == model and found.object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/none")


def test_a_greedy_answer_streams_the_same(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, max_tokens=24)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 24
    texts, ends, usage = streamed(client, model, max_tokens=24)
    assert texts == {0: answer.choices[0].message.content} and ends == {0: "length"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_the_prefix_cache_shows_in_usage(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Repeat: " + "lighthouse " * 40}]
    first = ask(client, model, messages=messages, max_tokens=1).usage.prompt_tokens_details.cached_tokens
    second = ask(client, model, messages=messages, max_tokens=1).usage.prompt_tokens_details.cached_tokens
    assert second > first and second % 16 == 0


def test_n_choices_under_one_seed_differ_and_repeat(client: openai.OpenAI, model: str) -> None:
    def draw(**more: Any) -> list[str]:
        answer = ask(client, model, n=4, temperature=1, seed=5, max_tokens=16, **more)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    texts = draw()
    assert len(set(texts)) > 1 and draw() == texts
    assert [
        text for _, text in sorted(streamed(client, model, n=4, temperature=1, seed=5, max_tokens=16)[0].items())
    ] == texts


def test_seed_zero_is_a_seed(client: openai.OpenAI, model: str) -> None:
    texts = {ask(client, model, temperature=1, seed=0, max_tokens=12).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_stop_strings_cut_cleanly_wherever_they_fall(client: openai.OpenAI, model: str) -> None:
    text = ask(client, model, max_tokens=24).choices[0].message.content
    for start in range(3, len(text) - 8, 20):
        stop = text[start : start + 6]
        answer = ask(client, model, max_tokens=24, stop=[stop]).choices[0]
        assert answer.message.content == text[: text.index(stop)]
        assert answer.finish_reason == "stop" and answer.model_extra["stop_reason"] == stop
        assert streamed(client, model, max_tokens=24, stop=[stop])[0] == {0: answer.message.content}


def test_a_held_back_beginning_of_a_stop_string_is_released(client: openai.OpenAI, model: str) -> None:
    text = ask(client, model, max_tokens=12).choices[0].message.content
    kept = ask(client, model, max_tokens=12, stop=[text[-3:] + "ZZZ"]).choices[0]
    assert kept.message.content == text and kept.finish_reason == "length"
    assert streamed(client, model, max_tokens=12, stop=[text[-3:] + "ZZZ"])[0] == {0: text}


def test_stop_token_ids_and_ignore_eos(client: openai.OpenAI, model: str) -> None:
    text = ask(client, model, max_tokens=8).choices[0].message.content
    ids = post(client, "../tokenize", {"prompt": text})["tokens"]  # type: ignore[index]
    answer = ask(client, model, max_tokens=8, extra_body={"stop_token_ids": [ids[3]]}).choices[0]
    assert answer.finish_reason == "stop" and answer.model_extra["stop_reason"] == ids[3]
    assert text.startswith(answer.message.content)
    longer = ask(client, model, max_tokens=100, extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 100 and longer.choices[0].finish_reason == "length"
    least = ask(client, model, max_tokens=100, extra_body={"min_tokens": 60})
    assert least.usage.completion_tokens >= 60


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    choice = ask(client, model, max_tokens=8, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True) and entry.logprob <= 0
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the likeliest"
    pieces = [
        entry
        for chunk in ask(client, model, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [p.token for p in pieces] == [e.token for e in entries]
    assert [p.logprob for p in pieces] == pytest.approx([e.logprob for e in entries], abs=1e-3)


def test_completions_of_every_prompt_shape(client: openai.OpenAI, model: str) -> None:
    def complete(prompt: Any, **more: Any) -> Any:
        return client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=6, **more)

    one = complete("The sea is")
    ids = post(client, "../tokenize", {"prompt": "The sea is"})["tokens"]  # type: ignore[index]
    assert one.usage.prompt_tokens == len(ids)
    assert complete(ids).choices[0].text == one.choices[0].text
    batch = complete([ids, ids, ids])
    assert [choice.text for choice in batch.choices] == [one.choices[0].text] * 3
    mixed = complete(["The sea is", "Two plus two is"], n=2)
    assert [choice.index for choice in mixed.choices] == [0, 1, 2, 3]
    assert mixed.choices[0].text == mixed.choices[1].text == one.choices[0].text
    assert complete("The sea is", echo=True).choices[0].text == "The sea is" + one.choices[0].text
    logprobs = complete("The sea is", logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == one.choices[0].text and logprobs.text_offset[0] == 0


def test_tokenize_agrees_with_usage_and_detokenize_inverts_it(client: openai.OpenAI, model: str) -> None:
    count = post(client, "../tokenize", {"messages": OCEAN})["count"]  # type: ignore[index]
    assert count == ask(client, model, max_tokens=1).usage.prompt_tokens
    for text in ("", " a  b\n", "é\u4e2d\U0001f600 e\u0301", "<b>&amp;</b>", "x" * 10_000):
        tokens = post(client, "../tokenize", {"prompt": text})["tokens"]  # type: ignore[index]
        assert post(client, "../detokenize", {"tokens": tokens}) == {"prompt": text}


def test_tiny_temperatures_and_narrow_filters_equal_greedy(client: openai.OpenAI, model: str) -> None:
    greedy = ask(client, model, max_tokens=12).choices[0].message.content
    for more in (
        {"temperature": 1e-6},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 1, "extra_body": {"top_k": 1}},
        {"temperature": 1, "extra_body": {"min_p": 1}},
    ):
        assert ask(client, model, max_tokens=12, seed=1, **more).choices[0].message.content == greedy


def test_a_banned_token_is_not_drawn(client: openai.OpenAI, model: str) -> None:
    text = ask(client, model, max_tokens=1).choices[0].message.content
    (token,) = post(client, "../tokenize", {"prompt": text})["tokens"]  # type: ignore[index]
    assert ask(client, model, max_tokens=1, logit_bias={str(token): -100}).choices[0].message.content != text


def test_closing_a_stream_frees_the_engine(client: openai.OpenAI, model: str, server: str) -> None:
    stream = ask(client, model, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 5
    while gauge(server, "vllm:num_requests_running") and time.monotonic() < until:
        time.sleep(0.02)
    assert gauge(server, "vllm:num_requests_running") == 0
    assert gauge(server, "slipring:num_free_blocks") == gauge(server, "slipring:num_blocks")


def test_many_async_streams_equal_the_lone_ones(client: openai.OpenAI, model: str, server: str) -> None:
    questions = [f"Name {n} things that float." for n in range(2, 10)]
    alone = [
        ask(client, model, messages=[{"role": "user", "content": q}], max_tokens=16).choices[0].message.content
        for q in questions
    ]

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="x", max_retries=0) as many:

            async def one(question: str) -> str:
                text = ""
                async for chunk in await many.chat.completions.create(
                    model=model,
                    temperature=0,
                    max_tokens=16,
                    stream=True,
                    messages=[{"role": "user", "content": question}],
                ):
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(one(question) for question in questions))

    assert asyncio.run(main()) == alone


def test_request_ids_are_readable(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, max_tokens=1, extra_headers={"X-Request-Id": "trace-7"})
    assert answer._request_id == "trace-7" and answer.id == "chatcmpl-trace-7"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
         "messages[0].content[0].type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)  # fmt: skip
def test_bad_requests(client: openai.OpenAI, model: str, more: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, model, stream=stream, **more)
    assert refused.value.param == param and refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt(client: openai.OpenAI, model: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, model, stream=stream, messages=[{"role": "user", "content": "x " * 20_000}])
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        ask(client, "no-such-model")
    assert refused.value.code == "model_not_found"
