"""What clients have really sent to servers of this kind, sent to a real one: the answer is the right one, and whatever
it was, the server is as it was before (`alive`). Each row changes one thing of a good body.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.http.calls import CHAT, COMPLETIONS
from tests.serving import alive, server_at

HI = [{"role": "user", "content": "Say hello."}]
GREEDY = {"messages": HI, "temperature": 0, "max_tokens": 6}
VOCAB = 49_152
BIG = 1 << 63
MAX_LEN = 8192


def post(url: str, path: str, body: Any = None, raw: bytes | None = None, **headers: str) -> requests.Response:
    data = json.dumps(body).encode() if raw is None else raw
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return requests.post(url + path, data=data, headers={"Content-Type": "application/json", **named}, timeout=60)


def chat(**fields: Any) -> dict[str, Any]:
    return {**GREEDY, **fields}


def user(content: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": content}])


def refused(response: requests.Response, param: str | None = None) -> dict[str, Any]:
    """A plain 400 with the whole envelope and nothing of the inside in it."""
    assert response.status_code == 400, response.text[:300]
    assert response.headers["Content-Type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["type"] == "invalid_request_error" and "Traceback" not in error["message"]
    assert param is None or (error["param"] or "").startswith(param), error
    return error


@pytest.fixture
def unharmed(server: str) -> Iterator[str]:
    yield server
    alive(server)


@pytest.fixture(scope="module")
def bare(server: str) -> dict[str, Any]:
    """The answer's choice to the body without anything odd."""
    return server_at(server).post(CHAT, GREEDY)["choices"][0]


NULLS = dict.fromkeys((
    "top_p", "n", "stop", "max_completion_tokens", "seed", "logit_bias", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice", "parallel_tool_calls", "stream",
    "stream_options", "user",
))  # fmt: skip
NEWER = {
    "store": False, "service_tier": "auto", "verbosity": "low", "reasoning_effort": "low", "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"}, "safety_identifier": "u", "prompt_cache_key": "k",
    "x_future": [1, {"y": 2}], "modalities": ["text"], "audio": None, "include": [],
}  # fmt: skip
NO_EFFECT = [
    {"logit_bias": {}}, {"stop": []}, {"metadata": {}}, {"tools": None}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1},
    {"top_k": 0}, {"top_k": -1}, {"logprobs": False, "top_logprobs": None}, NULLS, NEWER,
    *({name: None} for name in NULLS), *({name: value} for name, value in NEWER.items()),
]  # fmt: skip


@pytest.mark.parametrize("fields", NO_EFFECT, ids=lambda fields: ",".join(fields)[:40])
def test_blanks_nulls_and_unknown_fields_change_nothing(server: str, bare: dict[str, Any], fields: Any) -> None:
    assert server_at(server).post(CHAT, chat(**fields))["choices"][0] == bare


REFUSED: list[tuple[str, Any, str | None]] = [
    *((CHAT, chat(logit_bias=bias), "logit_bias") for bias in (
        {"cat": -100}, {"1.5": 1}, {"": 1}, [1, 2], {str(VOCAB): 1},
    )),
    *((CHAT, chat(stop_token_ids=ids), "stop_token_ids") for ids in ([VOCAB], [-3], [VOCAB + 7, 1], list(range(200)))),
    *((CHAT, chat(seed=seed), "seed") for seed in (BIG, 2 * BIG - 1, 2 * BIG, -BIG - 1, "1", 1.5, True)),
    *((CHAT, chat(stop=stop), "stop") for stop in ("", [""], ["", "END"], [1], {"a": 1}, ["s"] * 17, ["a" * 10**6])),
    *((CHAT, chat(**{name: value}), name) for name, value in (
        ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("min_p", 1.1), ("temperature", -1), ("temperature", 2.5),
        ("temperature", "0.5"), ("max_tokens", True), ("max_tokens", 0), ("n", 0), ("presence_penalty", 1e308),
        ("top_logprobs", 2), ("logit_bias", {str(i): 1 for i in range(2000)}),
    )),
    *((CHAT, chat(logprobs=True, top_logprobs=count), "top_logprobs") for count in (21, -1, 16384, VOCAB)),
    *((COMPLETIONS, {"prompt": "hi", "logprobs": count}, "logprobs") for count in (-1, 21, VOCAB)),
    *((COMPLETIONS, {"prompt": prompt, "max_tokens": 2}, "prompt") for prompt in (
        [-1], [[-1]], [VOCAB], [1 << 62], [True, False], [1.5], [1, "a"], [[1], ["a"]], [], [[]], None, {},
    )),
    *((CHAT, user(content), "messages") for content in (
        [{"type": "nonsense"}], [{"type": "text"}], None, 7, [[["x"]]], [{"type": "input_audio", "input_audio": {}}],
    )),
    *((CHAT, {"messages": messages}, "messages") for messages in (
        {"role": "user", "content": "hi"}, "hi", [], [None], [{"role": "alien", "content": "x"}], [{"role": "user"}],
        None,
    )),
    (CHAT, {}, "messages"),
    (CHAT, chat(n=0, max_tokens=0, top_p=0, stream=True, user="", response_format={"type": ""}), None),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    *((CHAT, chat(chat_template_kwargs=kwargs), "chat_template_kwargs") for kwargs in (
        {"chat_template": "{{ 1 }}"}, {"tokenize": False}, {"messages": []}, {"tools": "x"},
        {"add_generation_prompt": True}, "x",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_meant_is_refused_by_name(unharmed: str, path: str, body: Any, param: str | None) -> None:
    began = time.monotonic()
    refused(post(unharmed, path, body), param)
    assert time.monotonic() - began < 20, "an upload and a check, no work"


@pytest.mark.parametrize("raw", [
    "[]", "[1]", "true", "null", "123", '"s"', "", "{", "[" * 100_000, '{"x":' * 100_000, "NaN", "\xff",
    '{"messages":[],"ignored":' + "[" * 100_000 + "}",
    *(json.dumps(GREEDY)[:-1] + f',"{name}":{number}}}' for name, number in (
        ("temperature", "NaN"), ("temperature", "Infinity"), ("temperature", "1e999"), ("top_p", "-Infinity"),
        ("max_tokens", "1e400"), ("seed", "9" * 5000),
    )),
], ids=lambda raw: raw[-30:])  # fmt: skip
def test_what_is_no_body_is_refused(unharmed: str, raw: str) -> None:
    refused(post(unharmed, CHAT, raw=raw.encode("latin-1")))


@pytest.mark.parametrize("deep", [
    {"metadata": 900}, {"tools": 900}, {"content": 500},
], ids=str)  # fmt: skip
def test_deep_nesting_is_refused_or_ignored(unharmed: str, deep: dict[str, int]) -> None:
    ((where, depth),) = deep.items()
    nest = "[" * depth + "]" * depth
    bodies = {
        "metadata": json.dumps(chat(metadata="NEST")),
        "tools": json.dumps(chat(tools=[{"type": "function", "function": {"name": "f", "parameters": "NEST"}}])),
        "content": json.dumps(user("NEST")),
    }
    assert post(unharmed, CHAT, raw=bodies[where].replace('"NEST"', nest).encode()).status_code in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_beyond_the_context(unharmed: str, path: str, stream: bool) -> None:
    body = user("x " * 2 * MAX_LEN) if path == CHAT else {"prompt": [1] * (MAX_LEN + 1)}
    error = refused(post(unharmed, path, {**body, "stream": stream}), "messages" if path == CHAT else "prompt")
    assert error["code"] == "context_length_exceeded" and str(MAX_LEN) in error["message"]


def test_three_megabytes_are_read_and_told_to_be_too_long(unharmed: str) -> None:
    error = refused(post(unharmed, CHAT, user("a" * (3 << 20))))
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"


def test_half_a_million_stop_strings(unharmed: str) -> None:
    refused(post(unharmed, CHAT, chat(stop=[f"x{i}" for i in range(500_000)])), "stop")


def test_a_million_keys(unharmed: str) -> None:
    raw = json.dumps(GREEDY)[:-1] + "," + ",".join(['"k":1'] * 1_000_000) + "}"
    assert post(unharmed, CHAT, raw=raw.encode()).status_code in (200, 400, 413)


def test_texts_in_parts_count_as_one_text(server: str) -> None:
    at = server_at(server)
    parts = user([{"type": "text", "text": "Say hel"}, {"type": "text", "text": "lo."}])
    assert at.post(CHAT, parts)["usage"] == at.post(CHAT, GREEDY)["usage"]


def test_prompts_of_ids(server: str) -> None:
    at = server_at(server)
    two = at.post(COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 2})
    assert len(two["choices"]) == 2 and two["usage"]["prompt_tokens"] == 3
    assert len(at.post(COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 2})["choices"]) == 1


def test_seed_zero_is_a_seed(server: str) -> None:
    at, body = server_at(server), {**GREEDY, "temperature": 1.5, "max_tokens": 12}
    texts = [at.post(CHAT, {**body, "seed": seed})["choices"][0]["message"]["content"] for seed in (0, 0, -1, BIG - 1)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    unseeded = {at.post(CHAT, {**body, "seed": None})["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(unseeded) > 1


def test_a_refused_neighbour_changes_nothing(unharmed: str) -> None:
    body = {**GREEDY, "max_tokens": 40, "stream": True, "ignore_eos": True}
    alone = post(unharmed, CHAT, {**body, "stream": False}).json()["choices"][0]["message"]["content"]
    stream = requests.post(unharmed + CHAT, json=body, stream=True, timeout=60)
    lines = stream.iter_lines()
    next(lines)
    refused(post(unharmed, CHAT, chat(stop_token_ids=[VOCAB, VOCAB + 7, -3], min_tokens=8, max_tokens=16)))
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == alone


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[{"role":"user","content":"a\\ud800b"}],"max_tokens":2}',
        b'{"messages":[{"role":"user","content":"x"}],"stop":["\\ud83d"],"max_tokens":2}',
        b'{"prompt":"\\udfff","echo":true,"max_tokens":2}',
    ],
)
def test_lone_surrogates(unharmed: str, raw: bytes) -> None:
    response = post(unharmed, COMPLETIONS if b"prompt" in raw else CHAT, raw=raw)
    assert response.status_code in (200, 400)
    json.loads(response.content.decode("utf-8"))


def test_no_address_is_ever_called(unharmed: str) -> None:
    """Images by URL: refused, and nobody has been asked."""
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.3)
        port = trap.getsockname()[1]
        for url in (
            f"http://127.0.0.1:{port}/a.png", f"http://[::1]:{port}/", f"http://0x7f000001:{port}/", "file:///etc/passwd",
            "http://169.254.169.254/latest", "/etc/passwd", "gopher://127.0.0.1", "data:image/png;base64,!!!",
            "data:image/png;base64," + "A" * (5 << 20),
        ):  # fmt: skip
            content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
            refused(post(unharmed, CHAT, user(content)), "messages")
        with pytest.raises(TimeoutError):
            trap.accept()


def test_client_strings_reach_no_header(unharmed: str) -> None:
    names = set(post(unharmed, CHAT, GREEDY).headers)
    odd = "x\x1b[31m\r\nSet-Cookie: a=b"
    response = post(unharmed, CHAT, chat(user=odd, model=odd))
    assert response.status_code == 404 and set(response.headers) == names
    given = post(unharmed, CHAT, GREEDY, x_request_id="a b;c\td" + "e" * 5000)
    assert len(given.headers["x-request-id"]) <= 128 and given.headers["x-request-id"].startswith("abcde")


def test_gzip_bodies(unharmed: str) -> None:
    good = gzip.compress(json.dumps(GREEDY).encode())
    assert post(unharmed, CHAT, raw=good, Content_Encoding="gzip").status_code == 200
    bomb = gzip.compress(b" " * (200 << 20))
    assert post(unharmed, CHAT, raw=bomb, Content_Encoding="gzip").status_code == 413
    refused(post(unharmed, CHAT, raw=good[: len(good) // 2], Content_Encoding="gzip"))
    error = refused(post(unharmed, CHAT, raw=b"no gzip at all", Content_Encoding="gzip"))
    assert error["message"] == "The body cannot be read: it is not valid gzip."
    for coding in ("br", "zstd", "unknown"):
        assert post(unharmed, CHAT, raw=good, Content_Encoding=coding).status_code == 415


def test_who_leaves_frees_what_he_held(unharmed: str) -> None:
    """Without a stream, too: while it waits, computes its prompt, or generates."""
    generates, computes = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True}, {"prompt": [5] * 3000}
    for body in (generates, computes):
        with socket.create_connection(("127.0.0.1", server_at(unharmed).port)) as client:
            data = json.dumps(body).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(0.2)
    alive(unharmed)


def test_a_hidden_request_is_never_executed(unharmed: str) -> None:
    """Framing that two servers could read in two ways: 400, the connection closes, and what hides stays unread."""
    hidden = b"POST /reset_prefix_cache HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    before = _count(unharmed, "/reset_prefix_cache")
    for framing in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 4\r\n\r\n{}", b"Content-Length: +2\r\n\r\n{}",
        b"Content-Length: 0x2\r\n\r\n{}", b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"X: a\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", b"X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    ):  # fmt: skip
        with socket.create_connection(("127.0.0.1", server_at(unharmed).port), timeout=3) as client:
            client.sendall(head + framing + hidden)
            answer = b""
            try:
                while piece := client.recv(65536):
                    answer += piece
            except TimeoutError:
                pass  # still open: then nothing but one refusal may have come
            assert answer.count(b"HTTP/1.") <= 1 and b" 200 " not in answer, framing
    assert _count(unharmed, "/reset_prefix_cache") == before


def _count(url: str, route: str) -> float:
    lines = [line for line in server_at(url).get("/metrics").splitlines() if f'"{route}"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("slipring:http_requests_total"))


def test_an_idle_connection_is_kept(server: str) -> None:
    """Longer than the 5 s after which servers of this kind used to close."""
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server_at(server).port), timeout=10) as client:
        for pause in (0, 6):
            time.sleep(pause)
            client.sendall(ask)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
