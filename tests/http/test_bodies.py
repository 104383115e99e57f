"""Shapes of bodies: what is refused, and which field the refusal names."""

from __future__ import annotations

import json

import pytest

from slipring.http.bodies import ChatBody, CompletionBody, DetokenizeBody, decode
from slipring.http.errors import ApiError


def refusal(data: bytes, kind=ChatBody) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(data, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (b'{"messages":{"role":"user"}}', "messages", "an array"),
        (b'{"messages":"hi"}', "messages", "got a string"),
        (b"{}", "messages", "Missing"),
        (b'{"messages":[null]}', "messages[0]", "got null"),
        (b'{"messages":[{"content":"x"}]}', "messages[0].role", "Missing"),
        (b'{"messages":[{"role":"user","content":[{"text":"x"}]}]}', "messages[0].content[0].type", "Missing"),
        (b'{"messages":[],"temperature":"0.5"}', "temperature", "a number or null"),
        (b'{"messages":[],"max_tokens":true}', "max_tokens", "got a boolean"),
        (b'{"messages":[],"n":1.5}', "n", "an integer"),
        (b'{"messages":[],"seed":"1"}', "seed", "an integer"),
        (b'{"messages":[],"temperature":1e999}', "temperature", "at most 2, got a number out of range"),
        (b'{"messages":[],"echo":1e999}', "echo", "`echo` must be a boolean or null, got a number out of range"),
        (b'{"messages":[],"user":-1e999}', "user", "`user` must be a string or null, got a number out of range"),
        (b'{"messages":[],"stop":[1e999]}', "stop[0]", "`stop[0]` must be a string, got a number out of range"),
        (b'{"messages":[{"role":1e999}]}', "messages[0].role", "must be a string, got a number out of range"),
        (b'{"messages":[],"logit_bias":{"1":1e999}}', "logit_bias", "must be a number of at most 1.8e308 in size"),
        (b'{"messages":[],"chat_template_kwargs":{"x":1e999}}', "chat_template_kwargs", "A value of `chat_template_kw"),
        (b'{"messages":[],"logit_bias":[1,2]}', "logit_bias", "an object"),
        (b'{"messages":[],"logit_bias":{"1":"x"}}', "logit_bias", "A value of `logit_bias` must be a number"),
        (b'{"messages":[],"stop":[1]}', "stop[0]", "a string"),
        (b'{"messages":[],"stop":{"a":1}}', "stop", "a string"),
        (b'{"messages":[],"stream_options":true}', "stream_options", "an object"),
    ],
)
def test_the_field_is_named(data: bytes, param: str, words: str) -> None:
    error = refusal(data)
    assert error.param == param and words in error.message


@pytest.mark.parametrize("data", [b"[]", b"[1]", b"true", b"null", b"123", b'"s"'])
def test_a_body_must_be_an_object(data: bytes) -> None:
    assert refusal(data).param is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"messages":[]}x',
        b'{"messages":[],"temperature":NaN}',
        b'{"messages":[],"temperature":Infinity}',
        b'{"messages":[],"top_p":-Infinity}',
        b'{"messages":[{"role":"user","content":"a\\ud800b"}]}',
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"x":' + b"[" * 100_000,
        b'{"messages":[],"x":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"messages":[],"x":' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
        b'{"messages":[{"role":"user","content":' + b"[" * 500 + b"]" * 500 + b"}]}",
    ],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    refusal(data)


@pytest.mark.parametrize(
    ("deep", "depth"),
    [
        ("[" * 199 + "]" * 199, 200),
        ("[" * 200 + "]" * 200, 201),
        ('[{"a":' * 99 + "1" + "}]" * 99, 199),
        ('[{"a":' * 100 + "1" + "}]" * 100, 201),
        ("[[],{}," * 199 + "1" + "]" * 199, 201),
        ("[" + "[]," * 5000 + "{}]", 3),
        (json.dumps("[" * 5000), 1),
        (json.dumps('\\"[' * 5000 + "\\"), 1),
        (json.dumps({'\\"{': '[\\\\"[' * 500}), 2),
        (json.dumps('\\"') + ',"y":' + "[" * 200 + "]" * 200, 201),
    ],
    ids=lambda value: str(value)[:12],
)
def test_bodies_may_be_200_deep(deep: str, depth: int) -> None:
    body = ('{"messages":[],"x":' + deep + "}").encode()
    if depth <= 200:
        assert decode(body, ChatBody).messages == []
    else:
        error = refusal(body)
        assert error.param in ("x", "y") and error.code == "nested_too_deeply"


@pytest.mark.parametrize("after", ["", "x", "long enough for another half"])
def test_half_a_surrogate_pair_is_not_called_truncated(after: str) -> None:
    message = refusal(b'{"messages":[],"user":"a\\ud83d' + after.encode() + b'"}').message
    assert "surrogate pair" in message and "truncated" not in message


def test_null_is_absent_and_unknown_fields_are_skipped() -> None:
    names = [field for field in ChatBody.__struct_fields__ if field != "messages"]
    nulls = ",".join(f'"{name}":null' for name in names)
    data = f'{{"messages":[],{nulls},"x_future":[1,{{"y":2}}],"store":false}}'.encode()
    assert decode(data, ChatBody) == decode(b'{"messages":[]}', ChatBody)


def test_a_million_keys_are_skipped() -> None:
    data = b'{"prompt":"x",' + b",".join(b'"k%d":1' % i for i in range(10**6)) + b"}"
    assert decode(data, CompletionBody).prompt == "x"


def test_huge_integers_are_kept_for_the_range_check() -> None:
    assert decode(b'{"tokens":[' + b"9" * 30 + b"]}", DetokenizeBody).tokens == [int("9" * 30)]
    refusal(b'{"tokens":[' + b"9" * 5000 + b"]}", DetokenizeBody)
