"""What the real model says, through every protocol."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving import alive, server_at

MODEL = "smollm2"
OCEAN: Any = [{"role": "user", "content": "Write one sentence about the ocean."}]
WEATHER = {"name": "weather", "description": "The weather in a city.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def anthropic(server: str) -> Iterator[Any]:
    """Anthropic's client. Imported late: it takes seconds, which other tests need not pay."""
    with importlib.import_module("anthropic").Anthropic(base_url=server, api_key="any", max_retries=0) as made:
        yield made
    alive(server)


def ask(anthropic: Any, messages: Any, **more: Any) -> Any:
    limit = {"model": MODEL, "max_tokens": 100, "extra_body": {"temperature": 0}}
    return anthropic.messages.create(**{**limit, "messages": messages, **more})


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_one_sentence_through_every_protocol(server: str, anthropic: Any) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0)
    chat = client.chat.completions.create(model=MODEL, messages=OCEAN, temperature=0)
    text = chat.choices[0].message.content or ""
    assert "ocean" in text.lower() and text.endswith(".") and chat.choices[0].finish_reason == "stop"
    response = client.responses.create(model=MODEL, input=OCEAN, temperature=0)
    assert (response.output_text, response.status) == (text, "completed")
    message = ask(anthropic, OCEAN)
    assert (said(message), message.stop_reason) == (text, "end_turn")
    prompt = server_at(server).post("/tokenize", {"messages": OCEAN})["tokens"]
    plain = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in plain if chunk.choices) == text


def test_a_prefilled_answer_is_continued(anthropic: Any) -> None:
    text = said(ask(anthropic, OCEAN, max_tokens=24))
    begun = [*OCEAN, {"role": "assistant", "content": text[:20]}]
    assert text[:20] + said(ask(anthropic, begun, max_tokens=4)) in text


def test_a_conversation_with_tools_and_their_results(anthropic: Any) -> None:
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris", "days": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sunny, 21 C."}]},
        ]},
    ]  # fmt: skip
    assert "unny" in said(ask(anthropic, messages, max_tokens=40, tools=[WEATHER]))
