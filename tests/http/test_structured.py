"""From a body to what its answer must match, and what is refused on the way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipring.http.bodies import CompletionBody
from slipring.http.errors import ApiError
from slipring.http.exchange import ApiResponse
from slipring.http.structured import structured_output
from slipring.runtime.grammar import GrammarSpec
from tests.http.calls import CHAT, COMPLETIONS, HELLO, acall, events, make_api, named_events, refused
from tests.http.engine_double import EngineDouble

SCHEMA = {"type": "object", "properties": {"名": {"const": 1}}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
TAG = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}


def wish(**fields: Any) -> Any:
    return structured_output(CompletionBody(**fields))


def json_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


@pytest.mark.parametrize(
    ("fields", "spec", "param"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object"), "response_format"),
        (
            {"response_format": json_format(schema=SCHEMA, strict=False)},
            GrammarSpec("json_schema", json.dumps(SCHEMA, ensure_ascii=False)),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+"), "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object"), "structured_outputs.json_object"),
        (
            {"structured_outputs": {"json": '{"type": "null"}', "regex": None, "disable_any_whitespace": True}},
            GrammarSpec("json_schema", '{"type": "null"}', compact=True),
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"choice": ["a", "é"]}},
            GrammarSpec("choice", '["a", "é"]'),
            "structured_outputs.choice",
        ),
        ({"guided_json": True}, GrammarSpec("json_schema", "true"), "guided_json"),
        ({"guided_regex": "b"}, GrammarSpec("regex", "b"), "guided_regex"),
        ({"guided_choice": ["x"]}, GrammarSpec("choice", '["x"]'), "guided_choice"),
        ({"guided_grammar": "start: /a/"}, GrammarSpec("lark", "start: /a/"), "guided_grammar"),
    ],
)  # fmt: skip
def test_every_way_to_ask(fields: dict[str, Any], spec: GrammarSpec, param: str) -> None:
    assert wish(**fields) == (spec, param)


def test_nothing_asked() -> None:
    assert wish() is wish(response_format={"type": "text"}) is wish(guided_regex="", guided_choice=[]) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": json_format(name="x")}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_format(schema=[1])}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<g"]}},
            "response_format.structures[0].begin",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        wish(**fields)
    assert caught.value.status == 400 and caught.value.param == param


def test_a_structural_tag_becomes_lark() -> None:
    spec, param = wish(response_format={"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]})
    assert spec.kind == "lark" and '%json {"type": "integer"}' in spec.value and param == "response_format"


async def failing(path: str, body: dict[str, Any]) -> ApiResponse | bytes:
    """The answer of an engine that cannot follow the grammar beyond the first letters."""
    engine = EngineDouble(script=None)
    asking = asyncio.ensure_future(acall(make_api(engine), "POST", path, body))
    while not engine.requests:
        await asyncio.sleep(0.001)
    engine.say('{"')
    engine.end(reason="error", error="too complex", error_param=engine.requests[0].grammar_param)
    response = await asking
    stream: Any = response.body
    return response if isinstance(stream, bytes) else b"".join([frames async for frames in stream])


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (
            CHAT,
            {"messages": HELLO, "response_format": json_format(schema=SCHEMA)},
            "response_format.json_schema.schema",
        ),
        (COMPLETIONS, {"prompt": "hi", "guided_regex": "a+"}, "guided_regex"),
        (CHAT, {"messages": HELLO, "tool_choice": "required", "tools": [FUNCTION]}, "tools"),
    ],
)
def test_a_grammar_that_fails_in_mid_answer_is_the_requests_fault(path: str, more: dict[str, Any], param: str) -> None:
    """A client that tries again what failed with a 5xx would only wait for the same."""
    error = refused(asyncio.run(failing(path, more)))
    assert error["param"] == param and error["message"] == f"`{param}`: too complex."
    streamed = events(asyncio.run(failing(path, {**more, "stream": True})))
    assert streamed[-1]["error"] == error


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_calls_such_a_field_by_its_own_name(stream: bool) -> None:
    body = {"input": "hi", "stream": stream, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}
    answer = asyncio.run(failing("/v1/responses", body))
    if stream:
        error = named_events(answer)[-1]["response"]["error"]
        assert error["code"] == "invalid_prompt" and error["message"].startswith("`text.format")
    else:
        assert refused(answer)["param"].startswith("text.format")
