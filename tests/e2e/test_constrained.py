"""Constrained streams give equal tokens at any depth, with preemption and without (on a small model, whose words are
random); and clients get what they asked of the real one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
import uvloop
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.grammar import GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
NUM_STREAMS = 10
ROOMY = {"num_gpu_blocks_override": 1000}
CROWDED = {"block_size": 4, "num_gpu_blocks_override": 64}


async def _tokens(model: str, **settings: Any) -> tuple[list[list[int]], int]:
    engine = Engine(EngineConfig(model=model, max_num_seqs=16, **settings))
    await engine.start()
    try:
        grammar = await engine.compile_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)), "schema")
        found = await asyncio.gather(*(_stream(engine, grammar, number) for number in range(NUM_STREAMS)))
        return found, engine.stats().num_preemptions
    finally:
        await engine.stop()


async def _stream(engine: Engine, grammar: Any, number: int) -> list[int]:
    """The first stream is free, among the others."""
    done, tokens = asyncio.Event(), []

    def sink(delta: Delta) -> None:
        tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            assert delta.finish_reason == ("stop" if number else "length"), delta
            done.set()

    prompt = engine.tokenizer.encode("Somebody in a small boat, as JSON. " * (1 + number % 3))
    eos = tuple(engine.spec.eos_token_ids)
    params = SamplingParams(max_tokens=120, temperature=0.9, seed=number, stop_token_ids=eos)
    request = GenerationRequest(request_id=str(number), prompt_token_ids=prompt, params=params, grammar=grammar)
    if number == 0:
        params = SamplingParams(max_tokens=30, temperature=0.0)
        request = GenerationRequest(request_id="0", prompt_token_ids=prompt, params=params)
    engine.submit(request, sink)
    await asyncio.wait_for(done.wait(), 240)
    if number:
        jsonschema.validate(json.loads(engine.tokenizer.decode(tokens)), SCHEMA)
    return tokens


@pytest.fixture(scope="module")
def plain(small_model: str) -> list[list[int]]:
    return uvloop.run(_tokens(small_model, **ROOMY, async_scheduling=False, enable_prefix_caching=False))[0]


@pytest.mark.parametrize("pool", [ROOMY, CROWDED], ids=["roomy", "preempting"])
def test_depth_cache_and_preemption_change_no_token(
    small_model: str, plain: list[list[int]], pool: dict[str, int]
) -> None:
    found, num_preemptions = uvloop.run(_tokens(small_model, **pool))
    assert sum(a != b for a, b in zip(found, plain, strict=True)) == 0
    assert (num_preemptions > 0) == (pool is CROWDED)


class Person(BaseModel):
    name: str
    age: int


def client(server: str) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def test_parse_with_a_pydantic_model(server: str) -> None:
    answer = client(server).chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Ada is 36 years old. Who is she?"}],
        response_format=Person,
        max_tokens=200,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_forced_text_arrives_whole(server: str) -> None:
    wanted = "😀👨‍👩‍👧 你好 é"
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": wanted}}},
    }
    whole = client(server).chat.completions.create(**body).choices[0].message.content or ""
    stream = client(server).chat.completions.create(**body, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert json.loads(whole) == wanted and "".join(pieces) == whole and not any("\ufffd" in piece for piece in pieces)


def test_a_bad_schema_is_a_400_that_says_where(server: str) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "nonsense"}}}
    with pytest.raises(BadRequestError) as caught:
        client(server).chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert caught.value.param == "response_format.json_schema.schema" and "properties.p" in str(caught.value)
