"""Anthropic's own client."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import alive

MODEL = "smollm2"
HELLO: Any = [{"role": "user", "content": "Write one sentence about the ocean."}]
GREEDY = {"temperature": 0}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Imported late: it takes seconds, which other tests need not pay."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def client(server: str, anthropic: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server, api_key="any", max_retries=0, timeout=120) as made:
        yield made
    alive(server)


def ask(client: Any, **more: Any) -> Any:
    return client.messages.create(**{
        "model": MODEL, "max_tokens": 40, "messages": HELLO, "extra_body": GREEDY, **more,
    })  # fmt: skip


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_greedy_answer_streams_the_same(client: Any) -> None:
    answer = ask(client, system="You are brief.")
    assert answer.role == "assistant" and answer.stop_reason == "max_tokens"
    assert answer._request_id == answer.id.removeprefix("msg_")
    with client.messages.stream(
        model=MODEL, max_tokens=40, messages=HELLO, system="You are brief.", extra_body=GREEDY
    ) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert "".join(pieces) == said(last) == said(answer) and len(pieces) > 3
    assert last.stop_reason == answer.stop_reason and last.usage.output_tokens == answer.usage.output_tokens


def test_many_async_streams_equal_the_lone_ones(client: Any, anthropic: Any, server: str) -> None:
    questions = [[{"role": "user", "content": f"Name {n} things that float."}] for n in range(2, 6)]
    alone = [said(ask(client, messages=question, max_tokens=12)) for question in questions]

    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server, api_key="any", max_retries=0) as many:

            async def one(question: Any) -> str:
                async with many.messages.stream(
                    model=MODEL, max_tokens=12, messages=question, extra_body=GREEDY
                ) as stream:
                    return said(await stream.get_final_message())

            return await asyncio.gather(*map(one, questions))

    assert asyncio.run(main()) == alone


def test_counted_tokens_are_the_tokens_used(client: Any) -> None:
    more = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [WEATHER]}  # fmt: skip
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, **more).input_tokens
    usage = ask(client, max_tokens=1, **more).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens > 50
    again = ask(client, max_tokens=1, **more).usage
    assert again.cache_read_input_tokens >= 16 and again.input_tokens + again.cache_read_input_tokens == counted


def test_stop_sequences_and_limits(client: Any) -> None:
    text = said(ask(client))
    stop = text[10:16]
    answer = ask(client, stop_sequences=[stop])
    assert said(answer) == text[: text.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert ask(client, max_tokens=2).stop_reason == "max_tokens"


def test_refusals_are_the_clients_own_exceptions(client: Any, anthropic: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(client, model="no-such-model")
    assert unknown.value.type == "not_found_error" and unknown.value.request_id
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for more in ({"max_tokens": 0}, {"messages": [{"role": "user", "content": [image]}]}, {"stop_sequences": [""]}):
        with pytest.raises(anthropic.BadRequestError) as refused:
            ask(client, **more)
        assert refused.value.type == "invalid_request_error" and "`" in refused.value.api_message
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, messages=[{"role": "user", "content": "x " * 20_000}])


def test_the_beta_face_of_the_client(client: Any) -> None:
    answer = client.beta.messages.create(
        model=MODEL, max_tokens=4, messages=HELLO, betas=["context-management-2025-06-27", "some-other-beta"]
    )
    assert answer.stop_reason == "max_tokens"


def test_closing_a_stream_frees_the_engine(client: Any, server: str) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=4000, messages=[{"role": "user", "content": "Count from 1 to 1000."}]
    ) as stream:
        next(iter(stream.text_stream))
    alive(server)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_that_must_be_used_is_used_by_its_schema(client: Any, choice: Any) -> None:
    more = {"tools": [WEATHER], "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 100,
            "messages": [{"role": "user", "content": "What is the weather in Oslo for 3 days?"}]}  # fmt: skip
    answer = ask(client, **more)
    assert answer.stop_reason == "tool_use"
    (block,) = [block for block in answer.content if block.type == "tool_use"]
    assert block.name == "weather" and block.input["city"] in ("Paris", "Oslo") and 1 <= block.input["days"] <= 9
    with client.messages.stream(model=MODEL, extra_body=GREEDY, **more) as stream:
        last = stream.get_final_message()
    assert [b.input for b in last.content if b.type == "tool_use"] == [block.input]
    assert last.stop_reason == "tool_use"


def test_an_output_by_schema(client: Any, anthropic: Any) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"],
              "additionalProperties": False}  # fmt: skip
    answer = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(said(answer)).keys() == {"wet"} and answer.stop_reason == "end_turn"
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format"):
        ask(client, output_config={"format": {"type": "json_schema", "schema": {"type": "nonsense"}}})
