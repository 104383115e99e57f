"""Tools and reasoning through chat, over the double: what is checked, what the model is shown, what comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slipring.http.api import Api
from slipring.http.output_form import OutputForm
from slipring.http.reasoning import THINK
from slipring.runtime.request import Delta
from tests.http.calls import CHAT, HELLO, acall, call, events, make_api, refused, stream_bytes, value
from tests.http.engine_double import TEMPLATE, EngineDouble

PARIS = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
GET: Any = {"type": "function", "function": {"name": "get", "parameters": PARIS}}
PUT: Any = {"type": "function", "function": {"name": "put", "description": None, "parameters": None, "strict": True}}
TOOLS = {"messages": HELLO, "tools": [GET, PUT]}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'Well.\n{CALL}\n<tool_call>\n{{"name": "put", "arguments": {{}}}}\n</tool_call>'


def api(script: str, template: str = TEMPLATE, **config: Any) -> Api:
    return make_api(EngineDouble(script, max_model_len=4000, template=template), **config)


def choice(served: Api, **more: Any) -> dict[str, Any]:
    response = call(served, "POST", CHAT, {**TOOLS, **more})
    assert response.status == 200, response.body
    return value(response)["choices"][0]


def assembled(served: Api, **more: Any) -> dict[str, Any]:
    """A streamed choice 0 put together as a client does, with what OpenAI's chunks promise checked on the way."""
    message: dict[str, Any] = {"role": None, "content": None}
    calls: list[dict[str, Any]] = []
    finish = logprobs = None
    for event in events(stream_bytes(served, CHAT, {**TOOLS, **more}))[:-1]:
        for chunk in event["choices"]:
            assert finish is None
            delta, finish = chunk["delta"], chunk["finish_reason"]
            message["role"] = delta.pop("role", message["role"])
            if chunk["logprobs"] is not None:
                logprobs = (logprobs or []) + chunk["logprobs"]["content"]
            for piece in delta.pop("tool_calls", []):
                _add_piece(calls, piece)
            for key, text in delta.items():
                message[key] = (message.get(key) or "") + text
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"message": message, "finish_reason": finish, "logprobs": logprobs}


def _add_piece(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.pop("index")
    if index == len(calls):
        assert piece.keys() == {"id", "type", "function"} and piece["id"]
        assert piece["function"].keys() == {"name", "arguments"} and piece["function"]["arguments"] == ""
        calls.append(piece)
    else:
        assert index == len(calls) - 1 and piece.keys() == {"function"} and piece["function"].keys() == {"arguments"}
        calls[index]["function"]["arguments"] += piece["function"]["arguments"]


def same(streamed: dict[str, Any], plain: dict[str, Any]) -> None:
    for made in (streamed, plain):
        for number, found in enumerate(made["message"].get("tool_calls", [])):
            found["id"] = number
    plain["message"].pop("refusal")
    assert streamed["message"] == plain["message"] and streamed["finish_reason"] == plain["finish_reason"]


def test_calls_come_as_openai_sends_them() -> None:
    found = choice(api(TWO))
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] == "Well."
    first, second = found["message"]["tool_calls"]
    assert first["type"] == "function" and first["id"] != second["id"]
    assert first["function"] == {"name": "get", "arguments": '{"city": "Paris"}'}
    assert second["function"] == {"name": "put", "arguments": "{}"}
    same(assembled(api(TWO)), found)


def test_content_is_null_when_there_are_only_calls_and_calls_are_absent_when_there_are_none() -> None:
    assert choice(api(CALL))["message"]["content"] is None
    found = choice(api("Just words, <tool> and {braces}."))
    assert found["message"] == {"role": "assistant", "content": "Just words, <tool> and {braces}.", "refusal": None}
    assert found["finish_reason"] == "stop"
    same(assembled(api("Just words, <tool> and {braces}.")), found)


def test_a_call_cut_off_by_max_tokens_says_so_in_both_modes() -> None:
    size = CALL.index("Paris") + 3
    found = choice(api(CALL), max_tokens=size)
    assert found["finish_reason"] == "length"
    assert found["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Par'
    same(assembled(api(CALL), max_tokens=size), found)
    found = choice(api(CALL), max_tokens=12)
    assert found["message"]["content"] == CALL[:12] and "tool_calls" not in found["message"]


@pytest.mark.parametrize("stop", [{"stop": ["is"]}, {"stop_token_ids": [5]}])
def test_a_call_cut_off_by_a_stop_is_content_in_both_modes(stop: dict[str, Any]) -> None:
    """The double ends where its script does, as an engine at a stop string."""
    half = CALL[: CALL.index("Paris") + 3]
    found = choice(api(half), **stop)
    assert found["message"]["content"] == half and "tool_calls" not in found["message"]
    assert found["finish_reason"] == "stop"
    same(assembled(api(half), **stop), found)
    found = choice(api(f"{CALL}\n{half}"), **stop)
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Paris"}' and found["message"]["content"] == half
    same(assembled(api(f"{CALL}\n{half}"), **stop), found)
    found = choice(api(CALL), **stop)
    assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_call_cut_off_by_a_stop_is_text_in_other_apis(path: str) -> None:
    half = CALL[: CALL.index("Paris") + 3]
    tool = {"name": "get", "input_schema": GET["function"]["parameters"]}
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 900, "tools": [tool], "stop_sequences": ["is"]}
    if path == "/v1/responses":
        body = {"input": "hi", "tools": [{"type": "function", **GET["function"]}], "stop": ["is"]}
    answer = value(call(api(half), "POST", path, body))
    (item,) = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
    assert item["type"] in ("text", "output_text") and item["text"] == half


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


def test_only_allowed_tools_are_shown_and_forced() -> None:
    engine = EngineDouble("x", max_model_len=4000, template=TEMPLATE)
    served = make_api(engine)
    for mode in ("auto", "required"):
        choice(served, **allowed(mode, "put"))
        request = engine.requests[-1]
        prompt = bytes(request.prompt_token_ids).decode()
        assert '"put"' in prompt and '"get"' not in prompt
        assert (request.grammar is not None) is (mode == "required")
        assert request.grammar is None or '"city' not in request.grammar.text
    for wrong, param in (
        (allowed("maybe", "put"), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", "other"), "tool_choice.allowed_tools.tools"),
    ):
        assert refused(call(served, "POST", CHAT, {**TOOLS, **wrong}))["param"] == param


def test_no_tools_no_parsing() -> None:
    for more in ({"tool_choice": "none"}, {"tools": None}, {"tools": [], "tool_choice": "auto"}):
        found = choice(api(CALL), **more)
        assert found["message"]["content"] == CALL and found["finish_reason"] == "stop"
    assert choice(api(CALL, tool_call_parser="none"))["message"]["content"] == CALL


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_when_calls_may_not_be_parallel(stream: bool) -> None:
    take = assembled if stream else choice
    found = take(api(TWO), parallel_tool_calls=False)
    assert [c["function"]["name"] for c in found["message"]["tool_calls"]] == ["get"]
    assert found["finish_reason"] == "tool_calls" and found["message"]["content"] == "Well."


def test_generation_stops_behind_the_only_call() -> None:
    engine = EngineDouble(TWO, max_model_len=4000, template=TEMPLATE)

    async def main() -> dict[str, Any]:
        response = await acall(make_api(engine), "POST", CHAT, {**TOOLS, "parallel_tool_calls": False, "n": 2})
        await asyncio.sleep(0)
        return value(response)

    answer = asyncio.run(main())
    assert len(engine.aborted) == 1
    assert [len(c["message"]["tool_calls"]) for c in answer["choices"]] == [1, 1]
    assert answer["usage"]["completion_tokens"] == 2 * (TWO.index("}}") + 1), "nothing hidden is counted"


def test_logprobs_cover_every_token_once_and_in_order() -> None:
    asked = {"logprobs": True, "max_tokens": 400}
    plain, streamed = choice(api(TWO), **asked), assembled(api(TWO), **asked)
    assert streamed["logprobs"] == plain["logprobs"]["content"]
    assert "".join(entry["token"] for entry in streamed["logprobs"]) == TWO


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b!"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [GET, GET]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
         "tools[0].function.description"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "get"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    assert refused(call(api(""), "POST", CHAT, {**TOOLS, **body}))["param"] == param


@pytest.mark.parametrize("tools", [["x"], {"a": 1}, 5])
def test_tools_of_the_wrong_type(tools: Any) -> None:
    assert refused(call(api(""), "POST", CHAT, {**TOOLS, "tools": tools}))["param"].startswith("tools")


def test_blanks_of_the_former_function_calling_are_ignored() -> None:
    for more in ({"functions": None, "function_call": None}, {"functions": [], "function_call": "auto"}):
        assert choice(api("Hi"), **more)["message"]["content"] == "Hi"


def rendered(body: dict[str, Any], template: str) -> str:
    engine = EngineDouble("ok", max_model_len=4000, template=template)
    response = call(make_api(engine), "POST", CHAT, body)
    assert response.status == 200, response.body
    return bytes(engine.requests[-1].prompt_token_ids).decode()


SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}<assistant>"


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    text = rendered(TOOLS, SIMPLE)
    assert text.startswith("<system># Tools") and text.endswith("</tool_call><user>hi<assistant>")
    described = text[text.index("<tools>\n") + 8 : text.index("\n</tools>")].split("\n")
    assert [json.loads(line) for line in described] == [GET, PUT]
    with_system = rendered({**TOOLS, "messages": [{"role": "system", "content": "Be brief."}, *HELLO]}, SIMPLE)
    assert with_system.startswith("<system>Be brief.\n\n# Tools")
    assert rendered({**TOOLS, "tool_choice": "none"}, SIMPLE) == "<user>hi<assistant>"


def test_a_template_without_tools_gets_calls_and_results_as_text() -> None:
    asked = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Paris"}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": "Let me see."},
        {"role": "assistant", "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "function", "name": "put", "content": "done"},
    ]
    assert rendered({"messages": history}, SIMPLE) == (
        "<user>hi<assistant>Let me see."
        '<assistant><tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
        "<user><tool_response>\nsunny\n</tool_response>\n<tool_response>\ndone\n</tool_response><assistant>"
    )


def test_deeply_nested_parameters_are_served_or_refused() -> None:
    for depth in (50, 200, 440):
        schema: Any = {}
        for _ in range(depth):
            schema = {"properties": {"x": schema}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        for template in (TEMPLATE, SIMPLE):
            served = make_api(EngineDouble("ok", max_model_len=100_000, template=template))
            for choice in ("auto", "required"):
                body = {"messages": HELLO, "tools": [tool], "tool_choice": choice}
                assert call(served, "POST", CHAT, body).status in (200, 400)


def test_calls_in_messages_that_cannot_have_them() -> None:
    bad = {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}
    assert refused(call(api(""), "POST", CHAT, {"messages": [bad]}))["param"] == "messages[0].tool_calls"


THINKING = TEMPLATE + "{# <think> #}"
OPENED = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize(("template", "before"), [(THINKING, "<think>"), (OPENED, "")])
def test_reasoning_is_told_apart_and_counted(template: str, before: str) -> None:
    said = f"{before}\nhm, hm\n</think>\n\n{TWO}"
    found = choice(api(said, template))
    assert found["message"]["reasoning_content"] == found["message"]["reasoning"] == "hm, hm"
    assert found["message"]["content"] == "Well." and len(found["message"]["tool_calls"]) == 2
    same(assembled(api(said, template)), found)
    usage = value(call(api(said, template), "POST", CHAT, TOOLS))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": said.index("</think>") + len("</think>")}


@pytest.mark.parametrize("cuts", [(), (1,), (3,), (4,), (1, 2, 3, 4, 5)])
def test_the_token_that_ends_the_reasoning_ends_its_count_however_deltas_are_merged(cuts: tuple[int, ...]) -> None:
    texts, ids = ["<think>", "a", "b", "</think>", "c", "d"], [1, 2, 3, 7, 4, 5]
    parser = OutputForm(reasoning=THINK, end_of_reasoning=7).parser()
    for begin, end in zip((0, *cuts), (*cuts, 6), strict=True):
        parser.push(Delta(index=0, text="".join(texts[begin:end]), token_ids=ids[begin:end]))
    assert parser.num_reasoning == 4


def test_reasoning_that_is_never_closed_is_all_there_is() -> None:
    found = choice(api("hm ", OPENED))
    assert found["message"] == {
        "role": "assistant", "content": "", "refusal": None, "reasoning_content": "hm ", "reasoning": "hm ",
    }  # fmt: skip
    assert found["finish_reason"] == "stop"
    streamed = assembled(api("hm ", OPENED))
    assert streamed["message"] == {"role": "assistant", "content": "", "reasoning_content": "hm ", "reasoning": "hm "}


def test_reasoning_parser_none_leaves_the_text_alone() -> None:
    said = "<think>hm</think>Hi"
    found = value(call(api(said, THINKING, reasoning_parser="none"), "POST", CHAT, {"messages": HELLO}))
    assert found["choices"][0]["message"]["content"] == said
    assert "completion_tokens_details" not in found["usage"]


def test_special_tokens_are_shown_where_they_are_the_markers() -> None:
    for template, shown in ((TEMPLATE, False), (TEMPLATE + "{# [TOOL_CALLS] #}", True)):
        engine = EngineDouble("ok", max_model_len=4000, template=template)
        call(make_api(engine), "POST", CHAT, TOOLS)
        call(make_api(engine), "POST", CHAT, {"messages": HELLO})
        assert [request.skip_special_tokens for request in engine.requests] == [not shown, True]


def test_ids_of_mistral_calls_are_what_its_template_takes() -> None:
    found = choice(api('[TOOL_CALLS][{"name": "get", "arguments": {}}]', TEMPLATE + "{# [TOOL_CALLS] #}"))
    identity = found["message"]["tool_calls"][0]["id"]
    assert len(identity) == 9 and identity.isalnum()


def test_a_stream_that_stalls_gives_the_same_calls() -> None:
    """Deltas that were merged while nobody read."""

    async def main() -> bytes:
        engine = EngineDouble(None, max_model_len=4000)
        response = await acall(make_api(engine), "POST", CHAT, {**TOOLS, "stream": True})
        for letter in TWO:
            engine.say(letter)
        engine.end()
        return b"".join([frames async for frames in response.body])  # type: ignore[union-attr]

    found = events(asyncio.run(main()))[:-1]
    names = [p["function"].get("name") for e in found for p in e["choices"][0]["delta"].get("tool_calls", [])]
    assert [name for name in names if name] == ["get", "put"]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
