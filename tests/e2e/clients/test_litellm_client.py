"""LiteLLM, by OpenAI's and by Anthropic's protocol."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from tests.serving import alive, server_at

pytestmark = pytest.mark.filterwarnings("ignore")  # of its own types
OCEAN = [{"role": "user", "content": "Write one sentence about the ocean."}]


@pytest.fixture(scope="module")
def litellm(server: str) -> Iterator[Any]:
    """Imported late: it takes many seconds, which other tests need not pay. It must not look for news on the net."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    found = importlib.import_module("litellm")
    found.suppress_debug_info = True
    yield found
    alive(server)


@pytest.fixture
def openai_way(server: str) -> dict[str, Any]:
    return {"model": "openai/smollm2", "api_base": f"{server}/v1", "api_key": "any", "temperature": 0,
            "max_tokens": 24, "max_retries": 0, "messages": OCEAN}  # fmt: skip


def test_an_answer_streams_the_same_with_usage_at_the_end(litellm: Any, openai_way: dict[str, Any]) -> None:
    answer = litellm.completion(**openai_way)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens == 24
    chunks = list(litellm.completion(**openai_way, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == text
    assert built.usage.completion_tokens == answer.usage.completion_tokens
    assert built.usage.prompt_tokens == answer.usage.prompt_tokens


def test_null_tools_beside_a_choice(litellm: Any, openai_way: dict[str, Any], server: str) -> None:
    answer = litellm.completion(**openai_way, tools=None, tool_choice="auto")
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    raw = {"model": "smollm2", "messages": OCEAN, "max_tokens": 2, "tools": None, "tool_choice": "auto"}
    assert server_at(server).post("/v1/chat/completions", raw)["choices"]


def test_choices_keep_their_numbers(litellm: Any, openai_way: dict[str, Any]) -> None:
    answer = litellm.completion(**{**openai_way, "temperature": 1, "n": 2, "seed": 7})
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_the_anthropic_way(litellm: Any, openai_way: dict[str, Any], server: str) -> None:
    way = {**openai_way, "model": "anthropic/smollm2", "api_base": server}
    text = litellm.completion(**openai_way).choices[0].message.content
    answer = litellm.completion(**way)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens > 0
    chunks = litellm.completion(**way, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text


def test_the_responses_api(litellm: Any, openai_way: dict[str, Any]) -> None:
    way = {name: openai_way[name] for name in ("model", "api_base", "api_key", "temperature")}
    answer = litellm.responses(**way, input=OCEAN[0]["content"], max_output_tokens=24)
    assert answer.output[0].content[0].text == litellm.completion(**openai_way).choices[0].message.content


def test_refusals_are_its_own_exceptions(litellm: Any, openai_way: dict[str, Any], server: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**openai_way, "temperature": 5})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**openai_way, "model": "openai/none"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**openai_way, "messages": [{"role": "user", "content": "x " * 20_000}]})


class Wet(pydantic.BaseModel):
    wet: bool
    depth: int = pydantic.Field(ge=1, le=9)


def test_a_response_format(litellm: Any, openai_way: dict[str, Any]) -> None:
    asked = {**openai_way, "max_tokens": 60, "response_format": Wet}
    text = litellm.completion(**asked).choices[0].message.content
    Wet.model_validate_json(text)
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
