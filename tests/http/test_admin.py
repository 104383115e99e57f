"""Pause, resume, abort, reset: what an operator does to a server that is at work."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.http.calls import CHAT, events
from tests.serving import alive, server_at

LONG = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Stream:
    """A streamed completion, read by a thread of its own."""

    def __init__(self, url: str, request_id: str = "", **fields: Any) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.done = threading.Event()
        body = {**LONG, "max_tokens": 6000, **fields, "stream": True}
        headers = {"x-request-id": request_id} if request_id else {}
        self._response = requests.post(f"{url}/v1/completions", json=body, headers=headers, stream=True, timeout=120)
        assert self._response.status_code == 200
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._response.iter_lines():
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"]
        self.done.set()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def admin(server: str) -> Iterator[Callable[..., Any]]:
    """POST to the shared server; whatever happens it goes on afterwards, unharmed."""

    def post(path: str, **arguments: Any) -> Any:
        response = requests.post(server + path, timeout=60, **arguments)
        assert response.status_code == 200, response.text
        return response.json()

    try:
        yield post
    finally:
        requests.post(f"{server}/resume", timeout=30)
        requests.post(f"{server}/abort_requests", timeout=30)
        alive(server)


def is_paused(url: str) -> bool:
    return json.loads(server_at(url).get("/is_paused"))["is_paused"]


def later(url: str) -> Future[dict[str, Any]]:
    """A completion that is asked for now, by a thread."""
    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(1)
        stack.callback(pool.shutdown, wait=False)
        return pool.submit(server_at(url).post, "/v1/completions", {**LONG, "max_tokens": 3})


def test_frozen_streams_go_on_where_they_were(server: str, admin: Callable[..., Any]) -> None:
    undisturbed = server_at(server).post("/v1/completions", LONG)["choices"][0]["text"]
    stream = Stream(server, max_tokens=LONG["max_tokens"])
    until(lambda: stream.text)
    assert admin("/pause?mode=keep&clear_cache=false") == {"status": "paused"}
    assert is_paused(server)
    seen = ""
    while stream.text != seen:  # what was in flight comes back
        seen = stream.text
        time.sleep(0.3)
    waiting = later(server)
    time.sleep(0.3)
    assert stream.text == seen and not stream.done.is_set() and not waiting.done()
    assert admin("/resume") == {"status": "resumed"}
    assert stream.done.wait(60) and stream.text == undisturbed
    assert waiting.result(60)["usage"]["completion_tokens"] == 3
    assert not is_paused(server)


def test_pausing_may_wait_for_what_runs(server: str, admin: Callable[..., Any]) -> None:
    stream = Stream(server, max_tokens=200)
    admin("/pause?mode=wait")
    assert stream.done.wait(5) and stream.finish_reason == "length"
    waiting = later(server)
    time.sleep(0.3)
    assert not waiting.done()
    admin("/resume")
    assert waiting.result(60)["usage"]["completion_tokens"] == 3


def test_pausing_may_end_what_runs(server: str, admin: Callable[..., Any]) -> None:
    stream = Stream(server)
    until(lambda: stream.text)
    admin("/pause")
    assert stream.done.wait(5) and stream.finish_reason == "abort"
    assert json.loads(server_at(server).get("/load"))["server_load"] == 0


def test_requests_are_ended_by_name_or_all(server: str, admin: Callable[..., Any]) -> None:
    one, other = Stream(server, "one"), Stream(server, "other")
    assert json.loads(server_at(server).get("/load"))["server_load"] == 2
    assert admin("/abort_requests", json={"request_ids": ["one", "nobody"]}) == {"status": "aborted", "aborted": 1}
    assert one.done.wait(5) and one.finish_reason == "abort" and not other.done.is_set()
    third = Stream(server, "third")
    assert admin("/abort_requests", json={"request_ids": ["cmpl-third"]})["aborted"] == 1
    assert third.done.wait(5) and not other.done.is_set()
    assert admin("/abort_requests")["aborted"] == 1
    assert other.done.wait(5) and other.finish_reason == "abort"


def test_the_prefix_cache_is_forgotten(server: str, admin: Callable[..., Any]) -> None:
    body = {**LONG, "prompt": "A long beginning that many share. " * 8, "max_tokens": 1}

    def cached() -> int:
        usage = server_at(server).post("/v1/completions", body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert admin("/reset_prefix_cache") == {"success": True}
    assert cached() == 0


@pytest.mark.parametrize(
    ("target", "param"),
    [("/pause?mode=sometimes", "mode"), ("/pause?clear_cache=perhaps", "clear_cache"), ("/pause?mode=", "mode")],
)
def test_odd_wishes_are_refused_and_change_nothing(server: str, target: str, param: str) -> None:
    response = requests.post(server + target, timeout=30)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not is_paused(server)


def test_a_web_page_cannot_pause(server: str) -> None:
    response = requests.post(f"{server}/pause", headers={"Origin": "http://elsewhere"}, timeout=30)
    assert response.status_code == 415 and not is_paused(server)


def test_one_address_for_chat_and_completion(server: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    text, at = {**LONG, "max_tokens": 6}, server_at(server)
    assert at.post("/invocations", chat)["choices"] == at.post(CHAT, chat)["choices"]
    assert at.post("/invocations", text)["choices"][0]["text"] == at.post("/v1/completions", text)["choices"][0]["text"]
    with pytest.raises(urllib.error.HTTPError, match="400"):
        at.post("/invocations", {})


def test_events_of_an_ended_stream_are_whole(server: str, admin: Callable[..., Any]) -> None:
    body = {**LONG, "max_tokens": 6000, "stream": True}
    response = requests.post(f"{server}/v1/completions", json=body, stream=True, timeout=60)
    admin("/abort_requests")
    found = events(response.content)
    assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "abort"
