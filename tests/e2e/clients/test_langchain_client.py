"""LangChain's `ChatOpenAI` and `OpenAIEmbeddings`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pydantic
import pytest

from tests.serving import alive

OCEAN = "Write one sentence about the ocean."


class Wet(pydantic.BaseModel):
    """How wet it is."""

    wet: bool
    depth: int = pydantic.Field(ge=1, le=9)


def weather(city: Literal["Oslo", "Paris"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def chat(server: str) -> Iterator[Callable[..., Any]]:
    """Makes a greedy model. LangChain is imported late: it takes seconds, which other tests need not pay."""
    langchain_openai = importlib.import_module("langchain_openai")

    def make(**more: Any) -> Any:
        fixed = {"base_url": f"{server}/v1", "api_key": "any", "model": "smollm2", "temperature": 0, "max_retries": 0}
        return langchain_openai.ChatOpenAI(**{**fixed, "max_tokens": 40, **more})

    yield make
    alive(server)


def test_an_answer_streams_the_same(chat: Callable[..., Any]) -> None:
    model = chat()
    answer = model.invoke([("system", "You are brief."), ("human", OCEAN)])
    assert answer.content and answer.usage_metadata["output_tokens"] == 40
    chunks = list(model.stream([("system", "You are brief."), ("human", OCEAN)], stream_usage=True))
    assert len(chunks) > 3 and "".join(chunk.content for chunk in chunks) == answer.content


def test_a_batch(chat: Callable[..., Any]) -> None:
    model = chat(max_tokens=8)
    questions = ["Name a fish.", "Name a boat.", OCEAN]
    assert [a.content for a in model.batch(questions)] == [model.invoke(question).content for question in questions]


def test_the_responses_api(chat: Callable[..., Any]) -> None:
    answer = chat(use_responses_api=True).invoke(OCEAN)
    assert answer.text == chat().invoke(OCEAN).content and answer.id.startswith("resp_")
    assert "".join(chunk.text for chunk in chat(use_responses_api=True).stream(OCEAN)) == answer.text


def test_a_bad_request_is_told(chat: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="temperature"):
        chat(temperature=9).invoke(OCEAN)


def test_tools_that_are_bound_are_told_and_called(chat: Callable[..., Any]) -> None:
    bound = chat(max_tokens=100).bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    (call,) = bound.invoke("What is the weather in Oslo?").tool_calls[:1]
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Paris")
    plain, told = chat().invoke(OCEAN), chat().bind_tools([weather]).invoke(OCEAN)
    assert told.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]


def test_embeddings(server: str) -> None:
    embeddings = importlib.import_module("langchain_openai").OpenAIEmbeddings(
        base_url=f"{server}/v1", api_key="any", model="smollm2", max_retries=0, check_embedding_ctx_length=False
    )
    ocean, sea, boat = embeddings.embed_documents([OCEAN, OCEAN, "A boat."])
    assert len(ocean) == len(boat) == 64 and ocean == pytest.approx(sea, abs=1e-4) and ocean != boat
    assert embeddings.embed_query("A boat.") == pytest.approx(boat, abs=1e-3)
    alive(server)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(chat: Callable[..., Any], method: str) -> None:
    asked = OCEAN if method != "json_mode" else f'{OCEAN} Answer with this JSON alone: {{"wet": true, "depth": 3}}'
    found = chat(max_tokens=120).with_structured_output(Wet, method=method, include_raw=True).invoke(asked)
    if method == "json_mode":  # an object, of whatever shape the model likes, or the beginning of one
        assert found["raw"].content.lstrip().startswith("{")
    else:
        assert isinstance(found["parsed"], Wet), found
