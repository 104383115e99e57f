"""Tools through the official client, over a double that says what a model would; and read by a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
from pydantic import BaseModel

from tests.http.engine_double import TEMPLATE, EngineDouble
from tests.http.test_server import on_uvloop, serving

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
SAID = f"<think>\nA tool!\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
ASKED: Any = [{"role": "user", "content": "How is the weather in Paris?"}]


class Weather(BaseModel):
    city: str
    days: int


TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")


def double(script: str) -> EngineDouble:
    return EngineDouble(script, max_model_len=4000, template=TEMPLATE + "{# <think> <tool_call> #}")


@contextlib.asynccontextmanager
async def connected(engine: EngineDouble) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(engine) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            yield client


def ask(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])


def test_a_round_trip_with_the_synchronous_client() -> None:
    def talk(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
            message = ask(client).choices[0].message
            assert [call.function.name for call in message.tool_calls] == ["weather", "weather"]
            assert message.content == "Let me see." and message.model_extra["reasoning_content"] == "A tool!"
            results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
            history: Any = [*ASKED, message.model_dump(exclude_none=True), *results]
            again = client.chat.completions.create(model="m", messages=history, tools=[TOOL])
            assert again.choices[0].finish_reason == "tool_calls"

    async def test() -> None:
        async with serving(double(SAID)) as port:
            await asyncio.to_thread(talk, port)

    on_uvloop(test)


def test_the_streaming_helper_puts_the_same_calls_together() -> None:
    async def test() -> None:
        async with (
            connected(double(SAID)) as client,
            client.chat.completions.stream(model="m", messages=ASKED, tools=[TOOL]) as stream,
        ):
            kinds = [event.type async for event in stream]
            final = (await stream.get_final_completion()).choices[0]
        assert kinds.count("tool_calls.function.arguments.done") == 2 and "content.delta" in kinds
        calls = final.message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [Weather(city="Paris", days=2)] * 2
        assert len({call.id for call in calls}) == 2 and final.finish_reason == "tool_calls"
        assert final.message.content == "Let me see."

    on_uvloop(test)


def test_parse_gives_the_arguments_as_objects() -> None:
    async def test() -> None:
        async with connected(double(CALL)) as client:
            parsed = await client.chat.completions.parse(model="m", messages=ASKED, tools=[TOOL])
        (call,) = parsed.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Paris", days=2)
        assert parsed.choices[0].message.content is None

    on_uvloop(test)


def test_a_history_with_tools_is_read(server: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}
    history: Any = [
        *ASKED,
        {"role": "assistant", "content": "Let me see."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "It is sunny in Paris."}]},
    ]
    with openai.OpenAI(base_url=f"{server.rstrip('/')}/v1", api_key="x", max_retries=0, timeout=120) as client:
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=model, messages=history, tools=[TOOL], temperature=0, max_tokens=24
        )
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
