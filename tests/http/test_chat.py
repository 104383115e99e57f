"""Chat completions and the rules of conversations, over the double."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.http.calls import CHAT, HELLO, acall, call, events, make_api, refused, stream_bytes, value
from tests.http.engine_double import EngineDouble


def ask(body: dict[str, Any], engine: EngineDouble | None = None) -> Any:
    response = call(make_api(engine), "POST", CHAT, {"messages": HELLO, **body})
    assert response.status == 200, response.body
    return value(response)


def refusal(body: dict[str, Any], engine: EngineDouble | None = None) -> dict[str, Any]:
    return refused(call(make_api(engine), "POST", CHAT, {"messages": HELLO, **body}))


def rendered(body: dict[str, Any]) -> str:
    engine = EngineDouble()
    ask(body, engine)
    return bytes(engine.requests[-1].prompt_token_ids).decode()


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_an_answer() -> None:
    answer = ask({"model": "m", "max_tokens": 5})
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "m"
    assert answer["system_fingerprint"].startswith("slipring-")
    assert answer["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "logprobs": None,
            "finish_reason": "length", "stop_reason": None,
        }
    ]  # fmt: skip
    num_prompt = len(b"<user>hi</user><assistant>")
    assert answer["usage"] == {
        "prompt_tokens": num_prompt, "completion_tokens": 5, "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_streaming_gives_the_same_text_and_usage() -> None:
    body = {"messages": HELLO, "n": 2, "stream_options": {"include_usage": True}}
    found = events(stream_bytes(make_api(), CHAT, body))
    assert found[-1] == "[DONE]" and found[-2]["choices"] == []
    plain = ask({"n": 2})
    assert found[-2]["usage"] == plain["usage"]
    for index in range(2):
        choices = [c for event in found[:-1] for c in event["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in choices) == plain["choices"][index]["message"]["content"]
        assert [c["finish_reason"] for c in choices][-1] == "stop"
        assert all(c["finish_reason"] is None for c in choices[:-1])
    assert all("usage" not in event for event in found[:-2])


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
def test_no_usage_chunk_unless_asked_for(options: Any) -> None:
    found = events(stream_bytes(make_api(), CHAT, {"messages": HELLO, "stream_options": options}))
    assert all(event == "[DONE]" or event["choices"] for event in found)


@pytest.mark.parametrize("stream", [False, True])
def test_stream_options_that_cannot_be_meant(stream: bool) -> None:
    error = refusal({"stream": stream, "stream_options": {"include_usage": "yes"}})
    assert error["param"].startswith("stream_options")


def test_model_names() -> None:
    assert ask({"model": None})["model"] == "m"
    error = refused(call(make_api(), "POST", CHAT, {"model": "z", "messages": HELLO}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model" and "`m`" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (user([{"type": "nonsense"}]), "messages[0].content[0].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a"}}]),
         "messages[0].content[1].type"),
        (user([{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0].type"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": ""}}, "response_format.type"),
        ({"response_format": "text"}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
         "response_format.json_schema.schema"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field_and_never_start_a_stream(body: dict[str, Any], param: str, stream: bool) -> None:
    assert refusal({**body, "stream": stream})["param"] == param


def test_a_form_filled_with_zeros_and_blanks_is_refused_as_json() -> None:
    body = {
        "max_tokens": 0, "n": 0, "temperature": 0, "top_p": 0, "stream": True, "stop": ["\nObs:"], "logit_bias": None,
        "presence_penalty": 0, "user": "", "response_format": {"type": ""}, "tools": None,
    }  # fmt: skip
    assert refusal(body)["param"] in {"n", "max_tokens", "top_p"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context(stream: bool) -> None:
    error = refusal({**user("x" * 500), "stream": stream})
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "200" in error["message"] and str(500 + len("<user></user><assistant>")) in error["message"]


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert rendered(user(parts)) == rendered(user("Hello")) == "<user>Hello</user><assistant>"
    assert rendered(user([])) == rendered(user(""))


def test_what_changes_an_answer_and_cannot_be_is_refused_and_what_nobody_knows_is_ignored() -> None:
    assert refusal({"modalities": ["text", "audio"]})["param"] == "modalities"
    assert refusal({"stream": True, "stream_options": {"zzz": 1}})["param"] == "stream_options.zzz"
    body = {"messages": HELLO, "modalities": ["text"], "zzz": 1, "early_stopping": False}
    assert call(make_api(), "POST", CHAT, body).status == 200


def test_roles() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "U", "name": "ann"},
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "T"}]},
    ]
    text = rendered({"messages": messages})
    assert "<system>S</system><system>D</system><user>U</user>" in text
    assert "<user><tool_response>\nT\n</tool_response></user>" in text, "this template knows nothing of tools"


@pytest.mark.parametrize("arguments", ['{"path": ', "", '"Oslo"', "[1]", "null", '{"a":1}', None, {"a": 1}])
def test_any_tool_arguments_in_the_history(arguments: Any) -> None:
    call_ = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call_]},
        {"role": "tool", "tool_call_id": "c1", "content": "err"},
        {"role": "user", "content": "go"},
    ]
    ask({"messages": messages})


def test_tools_reach_the_template_unless_the_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert '<tools>[{"type": "function"' in rendered({"tools": tools})
    assert "<tools>" in rendered({"tools": tools, "tool_choice": "auto"})
    assert "<tools>" not in rendered({"tools": tools, "tool_choice": "none"})
    assert "<tools>" not in rendered({"tools": None, "tool_choice": "auto"})


def test_template_arguments_and_refusals() -> None:
    assert "<sour>" in rendered({"chat_template_kwargs": {"flavour": "sour"}})
    assert rendered({"add_generation_prompt": False}) == "<user>hi</user>"
    engine = EngineDouble(template="{{ raise_exception('roles must alternate') }}")
    error = refusal({}, engine)
    assert "roles must alternate" in error["message"] and error["param"] == "messages"
    assert refusal({}, EngineDouble(template=None))["code"] == "no_chat_template"
    assert refusal({}, EngineDouble(template="{{ messages[0].nothing.there }}"))["param"] == "messages"


def test_deep_tools_do_not_break_the_template() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    deep = tool["function"]["parameters"]  # type: ignore[index]
    for _ in range(400):
        deep["x"] = {}
        deep = deep["x"]
    assert call(make_api(), "POST", CHAT, {"messages": HELLO, "tools": [tool]}).status in (200, 400)


def test_a_prefilled_answer_is_continued_and_echoed_when_asked() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "AB"}]
    body = {"messages": messages, "continue_final_message": True}
    assert rendered(body) == "<user>hi</user><assistant>AB"
    parts = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "AB"}]}]
    assert rendered({**body, "messages": parts}) == rendered(body)
    assert ask(body)["choices"][0]["message"]["content"] == "Hello!"
    assert ask({**body, "echo": True})["choices"][0]["message"]["content"] == "ABHello!"


def test_logprobs() -> None:
    content = ask({"logprobs": True, "top_logprobs": 2, "max_tokens": 2})["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b"He"
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    bare = ask({"logprobs": True, "max_tokens": 2})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[], []]
    assert ask({"logprobs": False, "top_logprobs": None})["choices"][0]["logprobs"] is None


def test_fields_of_other_servers_are_ignored() -> None:
    ask({
        "store": False, "service_tier": "auto", "verbosity": "low", "reasoning_effort": "low", "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "x"}, "safety_identifier": "u", "prompt_cache_key": "k",
        "parallel_tool_calls": True, "modalities": ["text"], "audio": None, "response_format": {"type": "text"},
    })  # fmt: skip


def test_an_engine_error_is_a_500_or_an_error_event() -> None:
    async def main(stream: bool) -> Any:
        engine = EngineDouble(script=None)
        asking = asyncio.ensure_future(
            acall(make_api(engine), "POST", CHAT, {"messages": HELLO, "stream": stream, "n": 2})
        )
        while not engine.requests:
            await asyncio.sleep(0)
        engine.say("a")
        engine.end(reason="error", error="the worker died", index=1)
        response = await asking
        assert engine.sinks == {}, "the other choice is aborted"
        return b"".join([f async for f in response.body]) if stream else response  # type: ignore[union-attr]

    assert "the worker died" in refused(asyncio.run(main(False)), 500)["message"]
    found = events(asyncio.run(main(True)))
    assert found[-1]["error"]["message"] == "the worker died"
    assert not any("choices" in e and e["choices"][0]["finish_reason"] for e in found)
