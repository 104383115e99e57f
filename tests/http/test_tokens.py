"""/tokenize and /detokenize over the double."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.calls import HELLO, call, make_api, refused, value


def test_text_and_back() -> None:
    api = make_api()
    found = value(call(api, "POST", "/tokenize", {"prompt": "hé", "return_token_strs": True}))
    assert found["tokens"] == list("hé".encode()) and found["count"] == 3 and found["max_model_len"] == 200
    assert found["token_strs"][0] == "h" and len(found["token_strs"]) == 3
    assert value(call(api, "POST", "/detokenize", {"tokens": found["tokens"]})) == {"prompt": "hé"}
    empty = value(call(api, "POST", "/tokenize", {"prompt": ""}))
    assert empty["count"] == 0 and empty["token_strs"] is None


def test_a_conversation_counts_as_chat_would() -> None:
    api = make_api()
    count = value(call(api, "POST", "/tokenize", {"messages": HELLO}))["count"]
    usage = value(call(api, "POST", "/v1/chat/completions", {"messages": HELLO}))["usage"]
    assert count == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_refusals(path: str, body: dict[str, Any], param: str) -> None:
    assert refused(call(make_api(), "POST", path, body))["param"] == param


def test_the_model_is_checked() -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        refused(call(make_api(), "POST", path, {**body, "model": "z"}), 404)


def test_tools_count_as_chat_would_show_them() -> None:
    api, tools = make_api(), [{"type": "function", "function": {"name": "f", "description": "d"}}]
    body = {"messages": HELLO, "tools": tools}
    count = value(call(api, "POST", "/tokenize", body))["count"]
    assert count == value(call(api, "POST", "/v1/chat/completions", body))["usage"]["prompt_tokens"]
    assert count > value(call(api, "POST", "/tokenize", {"messages": HELLO}))["count"]
