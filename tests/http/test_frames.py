"""Golden server-sent events of chat and completions."""

from __future__ import annotations

import json

import pytest

from slipring.http.errors import engine_failed
from slipring.http.frames import ChatRenderer, CompletionRenderer, json_string
from slipring.http.logprobs import LogprobWriter
from slipring.http.reply import ReplyHead, Usage
from slipring.runtime.request import Delta, TokenLogprob
from tests.http.calls import events
from tests.http.engine_double import ByteTokenizer

HEAD = ReplyHead("x-1", 7, "m", "fp")


def renderer(kind, echo=("",), **options):
    return kind(HEAD, Usage([3], len(echo)), LogprobWriter(ByteTokenizer()), list(echo), **options)  # type: ignore[arg-type]


def piece(text: str, finish: str | None = None, index: int = 0, **more) -> Delta:
    return Delta(index=index, text=text, token_ids=(65,), finish_reason=finish, **more)


def test_chat_stream_byte_for_byte() -> None:
    chat = renderer(ChatRenderer)
    frames = [chat.delta(piece("Hi")), chat.delta(piece(' "you"\n')), chat.delta(piece("!", "stop")), chat.tail()]
    head = b'data: {"id":"x-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":'
    assert frames == [
        head + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + head + b'{"content":"Hi"},"logprobs":null,"finish_reason":null}]}\n\n',
        head + b'{"content":" \\"you\\"\\n"},"logprobs":null,"finish_reason":null}]}\n\n',
        head + b'{"content":"!"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]'
        b',"system_fingerprint":"fp"}\n\n',
        b"data: [DONE]\n\n",
    ]  # fmt: skip


def test_completion_stream_byte_for_byte() -> None:
    completion = renderer(CompletionRenderer, usage_at_end=True)
    frames = [completion.delta(piece("a")), completion.delta(piece("b", "length")), completion.tail()]
    head = b'data: {"id":"x-1","object":"text_completion","created":7,"model":"m",'
    usage = (
        b'"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
        b'"prompt_tokens_details":{"cached_tokens":0}}'
    )
    assert frames == [
        head + b'"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n',
        head + b'"choices":[{"index":0,"text":"b","logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n',
        head + b'"choices":[],' + usage + b',"system_fingerprint":"fp"}\n\ndata: [DONE]\n\n',
    ]


def test_every_choice_gets_its_role_chunk_once() -> None:
    chat = renderer(ChatRenderer, ("", ""))
    data = b"".join(chat.delta(piece("a", index=index)) for index in (1, 0, 1, 0))
    roles = [e["choices"][0]["index"] for e in events(data) if "role" in e["choices"][0]["delta"]]
    assert roles == [1, 0]


def test_no_chunk_while_text_is_held_back() -> None:
    completion = renderer(CompletionRenderer)
    assert completion.delta(piece("")) == b""
    chat = renderer(ChatRenderer)
    (role,) = events(chat.delta(piece("")))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat.delta(piece("")) == b""
    (last,) = events(chat.delta(piece("", "stop")))
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", [ChatRenderer, CompletionRenderer])
def test_usage_in_every_chunk_counts_up(kind) -> None:
    frames = renderer(kind, usage_at_end=True, usage_in_every=True)
    data = frames.delta(piece("a", num_cached_tokens=2)) + frames.delta(piece("b", "stop")) + frames.tail()
    found = events(data)[:-1]
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts) and counts[-1] == 2 and found[-1]["choices"] == []
    assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_continuous_usage_needs_include_usage() -> None:
    chat = renderer(ChatRenderer, usage_in_every=True)
    assert b"usage" not in chat.delta(piece("a")) + chat.tail()


def test_echo_comes_once_before_the_text() -> None:
    completion = renderer(CompletionRenderer, ("Once ",))
    texts = [
        event["choices"][0]["text"] for event in events(completion.delta(piece("u")) + completion.delta(piece("p")))
    ]
    assert texts == ["Once u", "p"]


def test_stop_reason_is_given_with_the_last_text() -> None:
    chat = renderer(ChatRenderer)
    for reason in ("END", 42, None):
        last = events(chat.delta(piece("x", "stop", stop_reason=reason)))[-1]
        assert last["choices"][0]["stop_reason"] == reason


def test_logprobs_in_both_shapes() -> None:
    entry = TokenLogprob(65, -0.25, 1, ((65, -0.25), (66, float("-inf"))))
    chat = events(renderer(ChatRenderer).delta(piece("A", logprobs=(entry,))))[-1]
    assert chat["choices"][0]["logprobs"]["content"] == [
        {
            "token": "A", "logprob": -0.25, "bytes": [65],
            "top_logprobs": [
                {"token": "A", "logprob": -0.25, "bytes": [65]},
                {"token": "B", "logprob": -9999.0, "bytes": [66]},
            ],
        }
    ]  # fmt: skip
    frames = renderer(CompletionRenderer, ("ab",))
    data = frames.delta(piece("A", logprobs=(entry,))) + frames.delta(piece("A", "stop", logprobs=(entry,)))
    first, second = [event["choices"][0]["logprobs"] for event in events(data)]
    assert first == {
        "tokens": ["A"], "token_logprobs": [-0.25], "top_logprobs": [{"A": -0.25, "B": -9999.0}], "text_offset": [2],
    }  # fmt: skip
    assert second["text_offset"] == [3]


def test_an_error_frame_has_the_error_body_alone() -> None:
    (error,) = events(renderer(ChatRenderer).error(engine_failed("the worker died")))
    assert error == {
        "error": {"message": "the worker died", "type": "server_error", "param": None, "code": "engine_error"}
    }


@pytest.mark.parametrize("text", ["", "é\u4e2d\U0001f600", '"\\\n\x00\x1f', "a\ud800b", "\udfff"])
def test_json_strings_are_valid_utf8(text: str) -> None:
    data = json_string(text)
    assert json.loads(data.decode("utf-8")) == text.encode("utf-8", "replace").decode()
