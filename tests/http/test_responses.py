"""OpenAI's Responses API over the double."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slipring.http.api import Api
from slipring.runtime.request import EngineDeadError, QueueFullError
from tests.http.calls import acall, call, make_api, named_events, refused, stream_bytes, value
from tests.http.engine_double import TEMPLATE, EngineDouble

RESPONSES = "/v1/responses"


def ask(api: Api | None = None, **body: Any) -> Any:
    response = call(api or make_api(), "POST", RESPONSES, {"input": "hi", **body})
    assert response.status == 200, response.body
    return value(response)


def refusal(status: int = 400, **body: Any) -> dict[str, Any]:
    return refused(call(make_api(), "POST", RESPONSES, {"input": "hi", **body}), status)


def prompt(api: Api | None = None, **body: Any) -> str:
    """What the model is asked to read."""
    api = api or make_api(EngineDouble(max_model_len=1000))
    ask(api, **body)
    engine: Any = api.engine
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def get(api: Api, path: str, status: int = 200) -> Any:
    response = call(api, "GET", f"{RESPONSES}/{path}")
    assert response.status == status, response.body
    return value(response)


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(work())  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


# One answer.


def test_an_answer() -> None:
    answer = ask(model="m", instructions="S", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50)
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["status"] == "completed"
    (item,) = answer["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    num_prompt = len(b"<system>S</system><user>hi</user><assistant>")
    assert answer["usage"] == {
        "input_tokens": num_prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": num_prompt + 6,
    }  # fmt: skip
    told = {name: answer[name] for name in ("model", "instructions", "metadata", "temperature", "max_output_tokens")}
    assert told == {
        "model": "m", "instructions": "S", "metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 50,
    }  # fmt: skip
    assert answer["store"] is True and answer["error"] is None and answer["incomplete_details"] is None


def test_an_answer_that_is_cut_is_incomplete() -> None:
    answer = ask(max_output_tokens=3)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete" and answer["output"][0]["content"][0]["text"] == "Hel"


HUGE = 10**30


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "maxProperties": HUGE}
    for _ in range(depth):
        schema = {"a": schema}
    return {"type": "object", "properties": schema}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("depth", [0, 195])
def test_an_answer_repeats_what_the_request_held_however_large_or_deep(depth: int, stream: bool) -> None:
    api = make_api(EngineDouble(max_model_len=100_000))
    schema = nested(depth)
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    body: dict[str, Any] = {"input": "hi", "max_output_tokens": HUGE, "tools": tools}
    if stream:
        answer = named_events(stream_bytes(api, RESPONSES, body))[-1]["response"]
    else:
        answer = ask(api, **body)
    assert answer["status"] == "completed" and answer["max_output_tokens"] == HUGE
    assert answer["tools"][0]["parameters"] == schema
    assert get(api, answer["id"]) == answer


@pytest.mark.parametrize("depth", [198, 300, 965, 970, 975, 980, 985, 990, 3000, 100_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_is_too_deep_to_be_repeated_is_refused_on_its_field(depth: int, stream: bool) -> None:
    tools = '[{"type":"function","name":"f","parameters":' + '{"a":' * depth + "1" + "}" * depth + "}]"
    body = f'{{"input":"hi","stream":{json.dumps(stream)},"tools":{tools}}}'.encode()
    answer = call(make_api(), "POST", RESPONSES, body)
    error = refused(answer)
    assert answer.status == 400 and "200 arrays and objects deep" in error["message"]
    assert error["param"] == ("tools" if depth < 900 else error["param"])


def test_an_empty_answer_still_has_a_message() -> None:
    async def main() -> Any:
        engine = EngineDouble(script=None)
        task = asyncio.ensure_future(acall(make_api(engine), "POST", RESPONSES, {"input": "hi"}))
        await until(lambda: engine.requests)
        engine.end()
        return value(await task)

    assert in_loop(main)["output"][0]["content"][0]["text"] == ""


def test_logprobs_come_when_they_are_included() -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    entries = ask(**body)["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == list("Hel")
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] for entry in entries)
    found = named_events(stream_bytes(make_api(), RESPONSES, {"input": "hi", **body}))
    pieces = [entry for e in found if e["type"] == "response.output_text.delta" for entry in e["logprobs"]]
    assert pieces == entries
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries
    assert ask(top_logprobs=2, max_output_tokens=3)["output"][0]["content"][0]["logprobs"] == []


# Streams.


@pytest.mark.parametrize("cut", [None, 3])
def test_a_stream_has_the_events_of_the_api_and_ends_with_the_answer(cut: int | None) -> None:
    found = named_events(stream_bytes(make_api(), RESPONSES, {"input": "hi", "max_output_tokens": cut}))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    pieces = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(pieces),
        "output_text.done", "content_part.done", "output_item.done", "incomplete" if cut else "completed",
    ]  # fmt: skip
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    last, plain = found[-1]["response"], ask(max_output_tokens=cut)
    for answer in (last, plain):
        answer["output"][0].pop("id"), answer.pop("id"), answer.pop("created_at"), answer.pop("completed_at")
    assert last == plain
    text = plain["output"][0]["content"][0]["text"]
    assert "".join(pieces) == text
    done = {event["type"]: event for event in found if event["type"].endswith(".done")}
    assert done["response.output_text.done"]["text"] == text
    assert done["response.content_part.done"]["part"]["text"] == text
    assert done["response.output_item.done"]["item"]["content"][0]["text"] == text
    item_id = found[2]["item"]["id"]
    assert found[2]["item"]["status"] == "in_progress" and found[2]["item"]["content"] == []
    assert all(event.get("item_id", item_id) == item_id and event.get("output_index", 0) == 0 for event in found)


def test_a_broken_stream_ends_with_a_failed_response_that_is_kept() -> None:
    async def main() -> tuple[list[dict[str, Any]], Any]:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        stream: Any = (await acall(api, "POST", RESPONSES, {"input": "hi", "stream": True})).body
        engine.say("He")
        engine.end(reason="error", error="the worker died")
        found = named_events(b"".join([frames async for frames in stream]))
        return found, value(await acall(api, "GET", f"{RESPONSES}/{found[0]['response']['id']}"))

    found, kept = in_loop(main)
    last = found[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed" and last["response"] == kept
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker died"}
    assert last["response"]["output"][0]["content"][0]["text"] == "He"


def test_a_stream_that_breaks_before_its_first_piece_begins_all_the_same() -> None:
    async def main() -> list[dict[str, Any]]:
        engine = EngineDouble(script=None)
        stream: Any = (await acall(make_api(engine), "POST", RESPONSES, {"input": "hi", "stream": True})).body
        engine.end(reason="error", error="gone")
        return named_events(b"".join([frames async for frames in stream]))

    kinds = [event["type"] for event in in_loop(main)]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


def test_an_aborted_answer_has_failed() -> None:
    async def main() -> Any:
        engine = EngineDouble(script=None)
        task = asyncio.ensure_future(acall(make_api(engine), "POST", RESPONSES, {"input": "hi"}))
        await until(lambda: engine.requests)
        engine.end("x", reason="abort")
        return value(await task)

    answer = in_loop(main)
    assert answer["status"] == "failed" and "aborted" in answer["error"]["message"]


def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        stream: Any = (await acall(api, "POST", RESPONSES, {"input": "hi", "stream": True})).body
        engine.say("He")
        stream.cancel()
        plain = asyncio.ensure_future(acall(api, "POST", RESPONSES, {"input": "hi"}))
        await until(lambda: len(engine.requests) == 2)
        plain.cancel()
        await asyncio.gather(plain, return_exceptions=True)
        assert engine.sinks == {} and len(api.flights) == 0 and len(api.responses._store) == 0

    in_loop(main)


CALLS = (
    '<think>\nhm\n</think>\n\nWell.\n<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
)
GET = {"type": "function", "name": "get", "parameters": {"type": "object"}}


def talkative() -> Api:
    return make_api(EngineDouble(CALLS, max_model_len=2000, template=TEMPLATE + "{# <think> #}"))


def nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from call to call."""
    for item in items:
        item.pop("id"), item.pop("call_id", None)
    return items


def test_reasoning_and_calls_are_items() -> None:
    answer = ask(talkative(), tools=[GET])
    plain = answer["output"]
    assert [item["id"].split("_")[0] for item in plain] == ["rs", "msg", "fc", "fc"]
    assert all(item["call_id"].startswith("call_") for item in plain[2:])
    found = named_events(stream_bytes(talkative(), RESPONSES, {"input": "hi", "tools": [GET]}))
    last = found[-1]["response"]["output"]
    reasoning = CALLS[: CALLS.index("Well.")].rstrip()
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len(reasoning)}, "of all that came"
    assert [e["item"] for e in found if e["type"] == "response.output_item.done"] == last
    texts: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    whole = [item.get("arguments") or item["content"][0]["text"] for item in last]
    assert [texts[item["id"]] for item in last] == whole == ["hm", "Well.", '{"city": "Paris"}', "{}"]
    assert nameless(last) == nameless(plain) == [
        {"type": "reasoning", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "status": "completed", "name": "get", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "status": "completed", "name": "get", "arguments": "{}"},
    ]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get"}])
def test_a_tool_that_must_be_used_becomes_a_grammar(choice: Any) -> None:
    engine = EngineDouble(CALLS, max_model_len=2000)
    api = make_api(engine)
    ask(api, tools=[GET], tool_choice=choice)
    ask(api, tools=[GET])
    forced, free = engine.requests
    assert forced.grammar is not None and free.grammar is None


def test_a_call_that_is_cut_is_incomplete() -> None:
    answer = ask(talkative(), tools=[GET], max_output_tokens=80)
    assert answer["status"] == "incomplete" and answer["output"][-1]["status"] == "incomplete"


def test_an_answer_with_calls_can_be_answered() -> None:
    api = talkative()
    first = ask(api, tools=[GET])
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}
    read = prompt(api, input=[output], previous_response_id=first["id"])
    assert read.index("<user>hi</user>") < read.index("Well.") < read.index("Paris") < read.index("sunny")


# What is read.


def test_items_of_every_kind_reach_the_prompt() -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                        {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]  # fmt: skip
    assert prompt(input=items, instructions="S") == (
        "<system>S</system><system>D</system><user>ab</user><assistant>cno</assistant><assistant>d</assistant>"
        "<user>e</user><assistant>"
    )


def test_calls_and_reasoning_belong_to_one_message_of_the_assistant() -> None:
    template = (
        "{% if tools %}{% endif %}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}|{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}"
        "{% if m.tool_call_id %}|{{ m.tool_call_id }}{% endif %}]{% endfor %}"
    )
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 2}', "id": "fc_2"},
        {"type": "function_call_output", "call_id": "c1", "output": "r1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "zzz"},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
    ]  # fmt: skip
    api = make_api(EngineDouble(template=template, max_model_len=1000))
    assert prompt(api, input=items) == (
        "[assistant|c|T|c1:f:1|c2:g:2][tool|r1||c1][tool|r2||c2][assistant|||c3:f:][tool|||c3]"
    )


def test_tools_are_shown_as_functions_and_hosted_ones_are_not() -> None:
    tools = [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "web_search"},
    ]  # fmt: skip
    api = make_api(EngineDouble(max_model_len=1000))
    shown = prompt(api, tools=tools)
    assert '"function": {"name": "f"' in shown and "web_search" not in shown
    assert "<tools>" not in prompt(tools=tools, tool_choice="none")
    told = ask(api, tools=tools)["tools"]
    assert told == [tools[0]]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    more = [*tools, {"type": "function", "name": "g"}]
    assert '"name": "f"' not in prompt(tools=more, tool_choice=allowed)


def test_efforts_are_told_to_the_template() -> None:
    api = make_api(EngineDouble(template="{{ reasoning_effort }}|{{ enable_thinking }}"))
    assert prompt(api, reasoning={"effort": "high"}) == "high|True"
    assert prompt(api, reasoning={"effort": "none"}) == "none|False"
    assert prompt(api, reasoning={"summary": "auto"}) == "|"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "r"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 99}, "top_logprobs"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"top_logprobs": 10**30}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"truncation": "some"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "mcp"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x"}}, "tool_choice.mode"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field(body: dict[str, Any], param: str) -> None:
    found = refusal(**body)["param"]
    assert found == param or (param == "metadata" and found.startswith("metadata"))


def test_too_long_an_input() -> None:
    error = refusal(input="x" * 300)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input" and "your input" in error["message"]


def test_truncation_leaves_out_the_oldest_turns() -> None:
    turns = [{"role": role, "content": f"{i}" * 20} for i in range(6) for role in ("user", "assistant")]
    items = [*turns, {"role": "user", "content": "last"}]
    api = make_api(EngineDouble(max_model_len=300))
    read = prompt(api, input=items, instructions="S", truncation="auto")
    assert read.startswith("<system>S</system><user>") and read.endswith("<user>last</user><assistant>")
    assert len(read) <= 300 - 75 and "5" * 20 in read and "0" * 20 not in read
    assert refused(call(api, "POST", RESPONSES, {"input": items}))["code"] == "context_length_exceeded"
    short = make_api(EngineDouble(max_model_len=2000))
    assert prompt(short, input=items, truncation="auto") == prompt(short, input=items)
    alone = [{"role": "user", "content": "x" * 400}]
    assert refused(call(api, "POST", RESPONSES, {"input": alone, "truncation": "auto"}))["param"] == "input"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(QueueFullError("full", 2), 429), (EngineDeadError("gone"), 503), (RuntimeError("x"), 500)]
)
@pytest.mark.parametrize("background", [False, True])
def test_what_the_engine_refuses(error: Exception, status: int, stream: bool, background: bool) -> None:
    engine = EngineDouble()
    engine.refuse = error
    body = {"input": "hi", "stream": stream and not background, "background": background}
    refused(call(make_api(engine), "POST", RESPONSES, body), status)


# What is kept.


def test_a_response_can_be_fetched_answered_and_forgotten() -> None:
    api = make_api(EngineDouble(max_model_len=1000))
    first = ask(api, instructions="S")
    assert get(api, first["id"]) == first
    second = ask(api, input="and?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    read = prompt(api, input="so?", previous_response_id=second["id"])
    assert read == (
        "<user>hi</user><assistant>Hello!</assistant><user>and?</user><assistant>Hello!</assistant>"
        "<user>so?</user><assistant>"
    )
    deleted = call(api, "DELETE", f"{RESPONSES}/{first['id']}")
    assert value(deleted) == {"id": first["id"], "object": "response", "deleted": True}
    get(api, first["id"], 404)
    assert ask(api, input="again", previous_response_id=second["id"])["status"] == "completed"


def test_streamed_responses_are_kept_too() -> None:
    api = make_api()
    last = named_events(stream_bytes(api, RESPONSES, {"input": "hi"}))[-1]["response"]
    assert get(api, last["id"]) == last


def test_what_is_unknown_is_told_by_its_field() -> None:
    error = refusal(404, previous_response_id="resp_no")
    assert error["param"] == "previous_response_id" and error["code"] == "response_not_found"
    api = make_api()
    for method, path in (("GET", "no"), ("DELETE", "no"), ("POST", "no/cancel"), ("GET", "no/input_items")):
        assert refused(call(api, method, f"{RESPONSES}/{path}"), 404)["code"] == "response_not_found"
    assert refusal(404, input=[{"type": "item_reference", "id": "msg_no"}])["param"] == "input[0].id"


def test_nothing_is_kept_unasked() -> None:
    api = make_api()
    answer = ask(api, store=False)
    assert answer["store"] is False
    get(api, answer["id"], 404)
    none = make_api(max_stored_responses=0)
    answer = ask(none)
    assert answer["store"] is False
    get(none, answer["id"], 404)
    refused(call(none, "POST", RESPONSES, {"input": "hi", "background": True}))


def test_the_oldest_go_first() -> None:
    api = make_api(max_stored_responses=2)
    ids = [ask(api)["id"] for _ in range(2)]
    get(api, ids[0])
    ids.append(ask(api)["id"])
    assert [call(api, "GET", f"{RESPONSES}/{response_id}").status for response_id in ids] == [200, 404, 200]


def test_items_can_be_referred_to() -> None:
    api = make_api()
    first = ask(api)
    items = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": first["output"][0]["id"]}]
    assert prompt(api, input=items) == "<user>a</user><assistant>Hello!</assistant><assistant>"


def test_input_items_come_in_pages() -> None:
    api = make_api(EngineDouble(max_model_len=1000))
    first = ask(api, input=[{"role": "user", "content": str(i)} for i in range(5)])
    path = f"{first['id']}/input_items"

    def texts(query: str) -> tuple[list[str], bool]:
        page = get(api, f"{path}?{query}")
        assert page["object"] == "list"
        if page["data"]:
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        return [item["content"][0]["text"] for item in page["data"]], page["has_more"]

    assert texts("") == (list("43210"), False)
    assert texts("order=asc&limit=2") == (list("01"), True)
    last = get(api, f"{path}?order=asc&limit=2")["last_id"]
    assert texts(f"order=asc&after={last}") == (list("234"), False)
    assert get(api, path)["data"][0]["type"] == "message"
    for query in ("order=up", "limit=0", "limit=101", "limit=x", "after=no"):
        refused(call(api, "GET", f"{RESPONSES}/{path}?{query}"))


# The background.


def test_a_response_in_the_background_runs_without_its_client() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        begun = value(await acall(api, "POST", RESPONSES, {"input": "hi", "background": True}))
        assert begun["status"] == "queued" and begun["output"] == []
        path = f"{RESPONSES}/{begun['id']}"
        assert value(await acall(api, "GET", path))["status"] == "in_progress"
        early = {"input": "x", "previous_response_id": begun["id"]}
        assert refused(await acall(api, "POST", RESPONSES, early))["param"] == "previous_response_id"
        engine.say("Hel")
        engine.end("lo")
        await until(lambda: not api.responses._running)
        done = value(await acall(api, "GET", path))
        assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == "Hello"
        assert value(await acall(api, "POST", f"{path}/cancel")) == done, "it has ended already"
        assert len(api.flights) == 0

    in_loop(main)


@pytest.mark.parametrize("method", ["cancel", "delete"])
def test_a_response_in_the_background_can_be_ended(method: str) -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        begun = value(await acall(api, "POST", RESPONSES, {"input": "hi", "background": True}))
        engine.say("Hel")
        path = f"{RESPONSES}/{begun['id']}"
        if method == "cancel":
            assert value(await acall(api, "POST", f"{path}/cancel"))["status"] == "cancelled"
            assert value(await acall(api, "GET", path))["status"] == "cancelled"
        else:
            assert value(await acall(api, "DELETE", path))["deleted"]
            refused(await acall(api, "GET", path), 404)
        assert engine.sinks == {} and len(api.flights) == 0 and not api.responses._running

    in_loop(main)


def test_what_runs_is_not_dropped_for_what_has_ended() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        api = make_api(engine, max_stored_responses=1)
        first, second = [
            value(await acall(api, "POST", RESPONSES, {"input": "hi", "background": True}))["id"] for _ in range(2)
        ]
        for response_id in (first, second):
            assert value(await acall(api, "GET", f"{RESPONSES}/{response_id}"))["status"] == "in_progress"
        for position in range(2):
            engine.end("x", position=position)
        await until(lambda: not api.responses._running)
        assert {(await acall(api, "GET", f"{RESPONSES}/{i}")).status for i in (first, second)} == {404, 200}

    in_loop(main)


def test_a_response_in_the_background_that_fails_says_why() -> None:
    async def main() -> Any:
        engine = EngineDouble(script=None)
        api = make_api(engine)
        begun = value(await acall(api, "POST", RESPONSES, {"input": "hi", "background": True}))
        engine.end(reason="error", error="the worker died")
        await until(lambda: not api.responses._running)
        return value(await acall(api, "GET", f"{RESPONSES}/{begun['id']}"))

    answer = in_loop(main)
    assert answer["status"] == "failed" and answer["error"]["message"] == "the worker died"


def test_only_what_runs_in_the_background_can_be_cancelled() -> None:
    api = make_api()
    answer = ask(api)
    assert refused(call(api, "POST", f"{RESPONSES}/{answer['id']}/cancel"))["param"] == "id"


def test_bodies_are_plain_json() -> None:
    api = make_api()
    response = call(api, "GET", f"{RESPONSES}/{ask(api, metadata={'é': '☃'})['id']}")
    assert response.headers["Content-Type"] == "application/json"
    assert json.loads(response.body)["metadata"] == {"é": "☃"}  # type: ignore[arg-type]
