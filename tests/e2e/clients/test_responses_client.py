"""The Responses API through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.serving import alive

MODEL = "smollm2"
OCEAN = "Write one sentence about the ocean."
WEATHER: Any = {
    "type": "function", "name": "weather", "description": "The weather in a city.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


class Wet(pydantic.BaseModel):
    wet: bool
    depth: int = pydantic.Field(ge=1, le=9)


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made
    alive(server)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(
        **{"model": MODEL, "input": OCEAN, "temperature": 0, "max_output_tokens": 40, **more}
    )


def test_a_greedy_answer_is_that_of_chat_and_streams_the_same(client: openai.OpenAI) -> None:
    answer = ask(client)
    messages: Any = [{"role": "user", "content": OCEAN}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40)
    assert answer.output_text == chat.choices[0].message.content and answer.status == "incomplete"
    assert answer.usage.total_tokens == chat.usage.total_tokens  # type: ignore[union-attr]
    with client.responses.stream(model=MODEL, input=OCEAN, temperature=0, max_output_tokens=40) as stream:
        *events, last = list(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert last.type == "response.incomplete"
    assert "".join(pieces) == last.response.output_text == answer.output_text and len(pieces) > 3


def test_many_async_streams_equal_the_lone_ones(client: openai.OpenAI, server: str) -> None:
    questions = [f"Name {n} things that float." for n in range(2, 6)]
    alone = [ask(client, input=question, max_output_tokens=12).output_text for question in questions]

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="x", max_retries=0) as many:

            async def one(question: str) -> str:
                text = ""
                async for event in await many.responses.create(
                    model=MODEL, input=question, temperature=0, max_output_tokens=12, stream=True
                ):
                    if event.type == "response.output_text.delta":
                        text += event.delta
                return text

            return await asyncio.gather(*map(one, questions))

    assert asyncio.run(main()) == alone


def test_a_conversation_goes_on_from_a_stored_response(client: openai.OpenAI) -> None:
    first = ask(client, instructions="You are a pirate.", metadata={"thread": "7"})
    kept = client.responses.retrieve(first.id)
    assert kept.output_text == first.output_text and kept.metadata == {"thread": "7"}
    (item,) = client.responses.input_items.list(first.id).data
    assert item.content[0].text == OCEAN  # type: ignore[union-attr]
    second = ask(client, input="Say it in three words.", previous_response_id=first.id)
    by_hand = ask(client, input=[{"role": "user", "content": OCEAN},
                                 {"role": "assistant", "content": first.output_text},
                                 {"role": "user", "content": "Say it in three words."}])  # fmt: skip
    assert second.output_text == by_hand.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        ask(client, previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"


def test_what_codex_sends(client: openai.OpenAI) -> None:
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output": "README.md"}'},
    ]
    events = list(ask(
        client, input=items, instructions="You are a coding agent.", stream=True, store=False, tool_choice="auto",
        tools=[WEATHER, {"type": "web_search"}], parallel_tool_calls=False, include=["reasoning.encrypted_content"],
        prompt_cache_key="thread", max_output_tokens=16,
    ))  # fmt: skip
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=6)
    part = answer.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(entry.token == entry.top_logprobs[0].token for entry in part.logprobs)


def test_the_background(client: openai.OpenAI, server: str) -> None:
    quick = ask(client, background=True, max_output_tokens=8)
    assert quick.status == "queued"
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(quick.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found.status == "incomplete" and found.output_text == ask(client, max_output_tokens=8).output_text
    endless = ask(client, background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    assert client.responses.retrieve(endless.id).status == "in_progress"
    assert client.responses.cancel(endless.id).status == "cancelled"
    alive(server)


def test_closing_a_stream_frees_the_engine(client: openai.OpenAI, server: str) -> None:
    stream = ask(client, stream=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    alive(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"input": []}, "input"),
        ({"input": "x " * 20_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ],
)
def test_bad_requests(client: openai.OpenAI, more: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, stream=stream, **more)
    assert refused.value.param == param and refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_tool_that_must_be_used_is_used_by_its_schema(client: openai.OpenAI, choice: Any) -> None:
    more: Any = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 100}
    answer = ask(client, input="What is the weather in Oslo?", **more)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Paris", "Oslo")
    with client.responses.stream(model=MODEL, input="What is the weather in Oslo?", temperature=0, **more) as stream:
        last = stream.get_final_response()
    assert [item.arguments for item in last.output if item.type == "function_call"] == [call.arguments]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    assert ask(client, input=[output], previous_response_id=answer.id, max_output_tokens=20).output_text


def test_an_answer_parsed_into_a_model(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": OCEAN, "temperature": 0, "text_format": Wet, "max_output_tokens": 60}
    answer = client.responses.parse(**asked)
    assert isinstance(answer.output_parsed, Wet)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}})
    assert (refused.value.param or "").startswith("text.format")
