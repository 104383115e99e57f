"""Anthropic's Messages API over the double."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipring.http.api import Api
from slipring.runtime.engine import HealthState
from slipring.runtime.request import ContextLengthError, EngineDeadError, QueueFullError
from tests.http.calls import HELLO, acall, call, make_api, named_events, refused_anthropic, stream_bytes, value
from tests.http.engine_double import TEMPLATE, EngineDouble

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


def body(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 50, "messages": HELLO, **more}


def ask(engine: EngineDouble | None = None, **more: Any) -> Any:
    response = call(make_api(engine), "POST", MESSAGES, body(**more))
    assert response.status == 200, response.body
    return value(response)


def refusal(**more: Any) -> str:
    error = refused_anthropic(call(make_api(), "POST", MESSAGES, body(**more)))
    assert error["type"] == "invalid_request_error"
    return error["message"]


def prompt(**more: Any) -> str:
    """What the model is asked to read."""
    engine = EngineDouble(max_model_len=1000)
    ask(engine, **more)
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def user(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_an_answer() -> None:
    answer = ask()
    assert answer.pop("id").startswith("msg_")
    num_prompt = len(b"<user>hi</user><assistant>")
    assert answer == {
        "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
    }  # fmt: skip


def test_request_ids_are_in_the_header_that_the_client_reads() -> None:
    response = call(make_api(), "POST", f"{MESSAGES}?beta=true", body(), {"x-request-id": "mine"})
    assert response.headers["request-id"] == "mine" and value(response)["id"] == "msg_mine"


def test_why_it_stopped() -> None:
    assert ask(max_tokens=2)["stop_reason"] == "max_tokens"

    async def stopped_by(stop_reason: int | str | None) -> dict[str, Any]:
        engine = EngineDouble(script=None)
        task = asyncio.ensure_future(acall(make_api(engine), "POST", MESSAGES, body(stop_sequences=["###"])))
        while not engine.requests:
            await asyncio.sleep(0)
        assert engine.requests[0].stop == ("###",)
        engine.end("x", stop_reason=stop_reason)
        return value(await task)

    by_string = asyncio.run(stopped_by("###"))
    assert (by_string["stop_reason"], by_string["stop_sequence"]) == ("stop_sequence", "###")
    for token in (None, 7):
        by_token = asyncio.run(stopped_by(token))
        assert (by_token["stop_reason"], by_token["stop_sequence"]) == ("end_turn", None)


def test_cached_tokens_are_counted_apart() -> None:
    async def main() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        plain = asyncio.ensure_future(acall(api, "POST", MESSAGES, body()))
        while not engine.requests:
            await asyncio.sleep(0)
        engine.say("a", cached=16)
        engine.end()
        streamed = (await acall(api, "POST", MESSAGES, body(stream=True))).body
        engine.say("a", cached=16)
        engine.end()
        return value(await plain)["usage"], named_events(b"".join([frames async for frames in streamed]))  # type: ignore[union-attr]

    usage, found = asyncio.run(main())
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] + 16 == len(b"<user>hi</user><assistant>")
    assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 16
    assert found[-2]["usage"] == usage


@pytest.mark.parametrize("max_tokens", [1, 50])
def test_a_stream_has_the_events_of_the_api_and_the_text_of_the_answer(max_tokens: int) -> None:
    found = named_events(stream_bytes(make_api(), MESSAGES, body(max_tokens=max_tokens)))
    kinds = [event["type"] for event in found]
    pieces = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * len(pieces), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start, end = found[0]["message"], found[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["id"].startswith("msg_")
    assert all(event["index"] == 0 for event in found if event["type"].startswith("content_block"))
    plain = ask(max_tokens=max_tokens)
    assert "".join(pieces) == plain["content"][0]["text"]
    assert end["delta"] == {"stop_reason": plain["stop_reason"], "stop_sequence": None}
    assert end["usage"] == plain["usage"]


def test_pieces_come_one_by_one_to_a_client_that_reads() -> None:
    async def main() -> bytes:
        engine = EngineDouble(script=None)
        stream: Any = (await acall(make_api(engine), "POST", MESSAGES, body(stream=True))).body
        out = bytearray()
        stream.attach(lambda frames: out.extend(frames) or True)
        for piece in ("He", "", "llo\ud800"):
            engine.say(piece)
        engine.end()
        return bytes(out)

    found = named_events(asyncio.run(main()))
    assert [e["delta"]["text"] for e in found if e["type"] == "content_block_delta"] == ["He", "llo?"]


def test_an_empty_answer_still_has_a_block() -> None:
    async def main(stream: bool) -> Any:
        engine = EngineDouble(script=None)
        task = asyncio.ensure_future(acall(make_api(engine), "POST", MESSAGES, body(stream=stream)))
        while not engine.requests:
            await asyncio.sleep(0)
        engine.end()
        response = await task
        return named_events(b"".join([f async for f in response.body])) if stream else value(response)  # type: ignore[union-attr]

    assert asyncio.run(main(False))["content"] == [text("")]
    kinds = [event["type"] for event in asyncio.run(main(True))]
    assert kinds == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_a_broken_stream_ends_with_an_error_event() -> None:
    async def main() -> list[dict[str, Any]]:
        engine = EngineDouble(script=None)
        stream: Any = (await acall(make_api(engine), "POST", MESSAGES, body(stream=True))).body
        engine.say("He")
        engine.end(reason="error", error="the worker died")
        return named_events(b"".join([frames async for frames in stream]))

    found = asyncio.run(main())
    assert found[-1] == {"type": "error", "error": {"type": "api_error", "message": "the worker died"}}
    assert "message_stop" not in [event["type"] for event in found]


# The prompt.


@pytest.mark.parametrize("system", ["S", [text("S")], [text("S", cache_control={"type": "ephemeral", "ttl": "1h"})]])
def test_system_comes_first(system: Any) -> None:
    assert prompt(system=system) == "<system>S</system><user>hi</user><assistant>"


def test_what_is_for_billing_alone_is_not_read() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=0f3a;"), text("S")]
    assert prompt(system=system) == prompt(system="S")


def test_messages_of_every_kind_reach_the_prompt() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "M"},
        {"role": "ctx", "content": [text("b"), text("c", cache_control={"type": "ephemeral"})]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "zzz"},
            text("d"),
        ]},
        {"role": "user", "content": []},
    ]  # fmt: skip
    assert prompt(messages=messages) == (
        "<user>a</user><system>M</system><user>bc</user><assistant>d</assistant><user></user><assistant>"
    )


def test_tool_calls_and_results_reach_the_template() -> None:
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}|{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}"
        "{% if m.tool_call_id %}|{{ m.tool_call_id }}{% endif %}]{% endfor %}"
    )
    engine = EngineDouble(template=template)
    messages = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "T", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {"x": 2}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [text("r1"), text("r2")], "is_error": True},
            {"type": "tool_result", "tool_use_id": "t2"},
            text("and?"),
        ]},
    ]  # fmt: skip
    ask(engine, messages=messages)
    assert bytes(engine.requests[0].prompt_token_ids).decode() == (
        "[assistant||T|t1:f:1|t2:g:2][tool|r1r2||t1][tool|||t2][user|and?|]"
    )


def test_a_final_assistant_message_is_continued() -> None:
    def ends(content: Any) -> str:
        return prompt(messages=[*HELLO, {"role": "assistant", "content": content}])

    assert ends("Hel") == "<user>hi</user><assistant>Hel"
    assert ends([text("H"), text("el ")]) == "<user>hi</user><assistant>Hel "
    for empty in ("", [], [text("")]):
        assert ends(empty) == "<user>hi</user><assistant>"


def test_tools_are_shown_as_functions_and_server_tools_are_not() -> None:
    schema = {"type": "object", "properties": {}}
    tools = [
        {"name": "f", "description": "d", "input_schema": schema, "input_examples": [{}], "strict": True,
         "cache_control": {"type": "ephemeral"}, "defer_loading": False, "eager_input_streaming": True},
        {"type": "custom", "name": "g", "input_schema": schema},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 2},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]  # fmt: skip
    shown = prompt(tools=tools)
    assert '"name": "f"' in shown and '"name": "g"' in shown and '"parameters"' in shown
    assert "web_search" not in shown and "input_examples" not in shown
    assert "<tools>" not in prompt(tools=tools, tool_choice={"type": "none"})
    assert "<tools>" not in prompt(tools=tools[2:], tool_choice={"type": "auto"})


def test_thinking_is_told_to_the_template() -> None:
    template = "{{ enable_thinking }}|{{ thinking }}"

    def told(**more: Any) -> str:
        engine = EngineDouble(template=template)
        ask(engine, **more)
        return bytes(engine.requests[0].prompt_token_ids).decode()

    assert told(thinking={"type": "enabled", "budget_tokens": 1024}) == "True|True"
    assert told(thinking={"type": "adaptive"}) == "True|True"
    assert told(thinking={"type": "disabled"}) == "False|False"
    assert told() == "|"


def test_what_steers_anthropics_service_is_ignored() -> None:
    more = {
        "output_config": {"effort": "high"}, "context_management": {"edits": []}, "metadata": {"user_id": "u"},
        "betas": ["x"], "service_tier": "auto", "container": None, "mcp_servers": [], "speed": "fast",
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,a,b", "x-api-key": "K"}
    response = call(make_api(api_keys=("K",)), "POST", f"{MESSAGES}?beta=true", body(**more), headers)
    assert response.status == 200


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": 0}, "`max_tokens` must be at least 1"),
        ({"max_tokens": None}, "`max_tokens` must be an integer"),
        ({"max_tokens": True}, "`max_tokens`"),
        ({"messages": []}, "`messages` must hold"),
        ({"messages": [{"role": "user"}]}, "content`"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "`messages[0].role`"),
        ({"messages": user({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}})},
         "`messages[0].content[0].type` must be `text`: this model reads text only"),
        ({"messages": user(text("x"), {"type": "document", "source": {}})}, "`messages[0].content[1].type`"),
        ({"messages": user({"type": "server_tool_use"})}, "got 'server_tool_use'"),
        ({"messages": user({"type": "text"})}, "`messages[0].content[0].text`"),
        ({"messages": user({"type": "tool_result", "content": "r"})}, "`messages[0].content[0].tool_use_id`"),
        ({"messages": user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})},
         "`messages[0].content[0].content[0].type`"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
         "`messages[0]` uses a tool"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}, *HELLO]},
         "`messages[0].content[0].name`"),
        ({"system": [{"type": "image"}]}, "`system[0].type`"),
        ({"stop_sequences": [""]}, "`stop_sequences`"),
        ({"stop_sequences": "x"}, "`stop_sequences`"),
        ({"temperature": -1}, "`temperature`"),
        ({"top_p": 0}, "`top_p`"),
        ({"thinking": {"type": "maybe"}}, "`thinking.type`"),
        ({"tools": [{"name": "f"}]}, "`tools[0].input_schema`"),
        ({"tools": [{"input_schema": {}}]}, "`tools[0].name`"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}, {"name": "a b", "input_schema": {}}]}, "`tools[1].name`"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "`tools[0].input_schema`"),
        ({"tool_choice": {"type": "some"}}, "`tool_choice.type`"),
        ({"tool_choice": {"type": "any"}}, "needs `tools`"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "`tool_choice.name`"),
        ({"output_config": {"format": {"type": "xml"}}}, "`output_config.format`"),
    ],
)  # fmt: skip
def test_bad_requests_name_what_is_wrong(more: dict[str, Any], named: str) -> None:
    assert named in refusal(**more)


def test_max_tokens_is_needed() -> None:
    error = refused_anthropic(call(make_api(), "POST", MESSAGES, {"messages": HELLO}))
    assert "Missing required field `max_tokens`" in error["message"]


# What the model writes, taken apart.

GET = {"name": "get", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALLS = (
    'Well.\n<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
)
THINKS = TEMPLATE + "{# <think> #}"


def served(script: str, **config: Any) -> Api:
    return make_api(EngineDouble(script, max_model_len=2000), **config)


def assembled(api: Api, **more: Any) -> dict[str, Any]:
    """A streamed message put together as a client does, with the order of its events checked on the way."""
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in named_events(stream_bytes(api, MESSAGES, body(**more))):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                is_open = True
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                for kind, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if kind in event["delta"]:
                        blocks[-1][key] += event["delta"][kind]
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
                written = blocks[-1].pop("json")
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(written)
            case "message_delta":
                assert not is_open
                message |= {**event["delta"], "usage": event["usage"], "content": blocks}
    return message


def nameless(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from call to call."""
    assert message.pop("id").startswith("msg_")
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return message


def test_calls_are_blocks() -> None:
    response = call(served(CALLS), "POST", MESSAGES, body(tools=[GET], max_tokens=500))
    plain = nameless(value(response))
    assert plain["stop_reason"] == "tool_use" and plain["content"] == [
        text("Well."),
        {"type": "tool_use", "name": "get", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "get", "input": {}},
    ]
    assert nameless(assembled(served(CALLS), tools=[GET], max_tokens=500)) == plain


def test_one_call_is_enough_where_several_are_not_wanted() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    response = call(served(CALLS), "POST", MESSAGES, body(tools=[GET], tool_choice=choice, max_tokens=500))
    assert [block["type"] for block in value(response)["content"]] == ["text", "tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get"}])
def test_a_tool_that_must_be_used_becomes_a_grammar(choice: dict[str, Any]) -> None:
    engine = EngineDouble(CALLS, max_model_len=2000)
    ask(engine, tools=[GET], tool_choice=choice)
    ask(engine, tools=[GET])
    forced, free = engine.requests
    assert forced.grammar is not None and free.grammar is None


def test_a_call_that_is_cut_has_an_empty_input() -> None:
    response = call(served(CALLS), "POST", MESSAGES, body(tools=[GET], max_tokens=60))
    answer = value(response)
    assert answer["stop_reason"] == "max_tokens" and answer["content"][1]["input"] == {}


def test_thinking_is_a_block() -> None:
    def thinking() -> Api:
        return make_api(EngineDouble("<think>\nhm\n</think>\n\nHello!", template=THINKS))

    plain = nameless(value(call(thinking(), "POST", MESSAGES, body())))
    assert plain["content"] == [{"type": "thinking", "thinking": "hm", "signature": ""}, text("Hello!")]
    assert nameless(assembled(thinking())) == plain


# Counting.


def test_counting_agrees_with_what_is_used() -> None:
    more = {
        "system": "S", "tools": [{"name": "f", "input_schema": {}}],
        "messages": [*HELLO, {"role": "assistant", "content": "H"}],
    }  # fmt: skip
    counted = call(make_api(), "POST", COUNT, {"model": "m", **more})
    assert value(counted) == {"input_tokens": ask(**more)["usage"]["input_tokens"]}
    assert refused_anthropic(call(make_api(), "POST", COUNT, {"messages": []}))["type"] == "invalid_request_error"
    refused_anthropic(call(make_api(), "POST", COUNT, {"model": "z", "messages": HELLO}), 404)


def test_what_does_not_fit_is_counted_all_the_same() -> None:
    long = [{"role": "user", "content": "x" * 500}]
    assert value(call(make_api(), "POST", COUNT, {"messages": long}))["input_tokens"] > 500
    assert "prompt is too long: " in refusal(messages=long)


# Refusals of the whole server, in this API's shape.


def test_every_refusal_has_the_shape_of_the_api() -> None:
    api = make_api(api_keys=("K",))
    key: dict[str, str | None] = {"x-api-key": "K"}
    for path in (MESSAGES, COUNT):
        assert refused_anthropic(call(api, "POST", path, body()), 401)["type"] == "authentication_error"
        assert refused_anthropic(call(api, "GET", path, headers=key), 405)["type"] == "invalid_request_error"
        refused_anthropic(call(api, "POST", path, body(), {**key, "content-type": "text/plain"}), 415)
        refused_anthropic(call(api, "POST", path, b"{", key), 400)
        assert refused_anthropic(call(api, "POST", path, body(model="z"), key), 404)["type"] == "not_found_error"
        assert call(api, "POST", path, body(), {"authorization": "Bearer K"}).status == 200
        engine = EngineDouble()
        engine.state = HealthState.DEAD
        assert refused_anthropic(call(make_api(engine), "POST", path, body()), 503)["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("full", 2.2), 429, "rate_limit_error"),
        (EngineDeadError("gone"), 503, "overloaded_error"),
        (ContextLengthError("too long"), 400, "invalid_request_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ],
)
def test_what_the_engine_refuses(error: Exception, status: int, kind: str, stream: bool) -> None:
    engine = EngineDouble()
    engine.refuse = error
    response = call(make_api(engine), "POST", MESSAGES, body(stream=stream))
    found = refused_anthropic(response, status)
    assert found["type"] == kind and "secret" not in found["message"]
    if status == 429:
        assert response.headers["Retry-After"] == "3"
    if status == 400:
        assert found["message"].startswith("prompt is too long: ")


def test_a_client_that_goes_away_frees_the_engine() -> None:
    async def main() -> EngineDouble:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        stream: Any = (await acall(api, "POST", MESSAGES, body(stream=True))).body
        stream.cancel()
        plain = asyncio.ensure_future(acall(api, "POST", MESSAGES, body()))
        while len(engine.requests) < 2:
            await asyncio.sleep(0)
        plain.cancel()
        await asyncio.gather(plain, return_exceptions=True)
        assert len(api.flights) == 0
        return engine

    assert asyncio.run(main()).sinks == {}
