"""Whatever a client sends, the answer is no 5xx, and every answer is valid UTF-8 JSON or events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipring.http.messages_bodies import CountTokensBody, MessagesBody
from slipring.http.responses_bodies import ResponsesBody
from slipring.http.stream import FrameStream
from tests.http.calls import CHAT, COMPLETIONS, acall, make_api

PATHS = {
    CHAT: ChatBody, COMPLETIONS: CompletionBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody,
    "/v1/messages": MessagesBody, "/v1/messages/count_tokens": CountTokensBody, "/v1/responses": ResponsesBody,
}  # fmt: skip
numbers = st.integers(-3, 300) | st.integers() | st.floats()
texts = st.text(max_size=8) | st.text(st.characters(categories=["Cs", "Cc", "So"]), max_size=4)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "x"])}, optional={"text": texts})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "alien"])},
        optional={"content": texts | st.none() | st.lists(parts, max_size=2), "name": values, "tool_calls": values},
    ),
    max_size=3,
)


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the kind's own field names; values that are often right, and often of any type."""
    likely: dict[str, st.SearchStrategy[Any]] = {
        "messages": messages, "prompt": texts | st.lists(st.integers(0, 299), max_size=5) | st.lists(texts, max_size=3),
        "input": texts | messages, "max_output_tokens": st.integers(0, 9),
        "tokens": st.lists(st.integers(0, 299), max_size=5), "model": st.sampled_from([None, "m", "z"]),
        "stream": st.booleans(), "n": st.integers(1, 3), "max_tokens": st.integers(0, 9), "stop": texts,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
        "logit_bias": st.dictionaries(st.integers(-1, 301).map(str), st.floats(-101, 101), max_size=3),
    }  # fmt: skip
    names = kind.__struct_fields__
    required = {name: likely[name] for name in ("messages", "prompt", "tokens", "input") if name in names}
    if kind is TokenizeBody:
        del required["messages"]
    rare = {name: st.one_of(likely.get(name, values), st.none(), values) for name in names if name not in required}
    return st.fixed_dictionaries(required, optional={**rare, "x_unknown": values})


async def check(path: str, data: bytes) -> None:
    response = await acall(make_api(), "POST", path, data)
    assert response.status < 500, (response.status, data)
    if isinstance(response.body, FrameStream):
        (b"".join([frames async for frames in response.body])).decode("utf-8")
        return
    answer = json.loads(response.body.decode("utf-8"), parse_constant=lambda name: pytest.fail(name))
    if response.status >= 400:
        keys = {"type", "message"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert answer["error"]["message"] and answer["error"].keys() == keys


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bodies_with_known_fields(path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(PATHS[path]))
    asyncio.run(check(path, json.dumps(body, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")))


@pytest.mark.parametrize("path", PATHS)
@given(body=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=50, deadline=None)
def test_any_bytes(path: str, body: bytes) -> None:
    asyncio.run(check(path, body))


@given(
    method=st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "DELETE", ""]) | st.text(max_size=5),
    path=st.sampled_from(["/v1/models/", "/health", ""]).flatmap(lambda p: st.text(max_size=9).map(lambda t: p + t)),
    headers=st.dictionaries(
        st.sampled_from(["authorization", "x-api-key", "x-request-id", "origin", "content-type"]), st.text(max_size=9)
    ),
)
@settings(max_examples=150, deadline=None)
def test_any_request_line_and_headers(method: str, path: str, headers: dict[str, str]) -> None:
    async def main() -> None:
        response = await acall(make_api(api_keys=("K",)), method, path, b"{}", headers)
        assert response.status < 500
        for value in response.headers.values():
            assert not set(value) & set("\r\n\0"), "no header can be split"

    asyncio.run(main())
