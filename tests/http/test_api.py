"""The route table: who gets in, and what every refusal looks like."""

from __future__ import annotations

import asyncio

import pytest

from slipring.http.messages_errors import ANTHROPIC_ERRORS
from slipring.http.routes import ROUTES
from slipring.http.stream import FrameStream
from slipring.runtime.engine import HealthState
from slipring.runtime.request import EngineDeadError, InvalidRequestError, QueueFullError
from tests.http.calls import CHAT, COMPLETIONS, HELLO, acall, call, events, make_api, refused, refused_anthropic, value
from tests.http.engine_double import EngineDouble

OPEN = {"/health", "/health/live", "/health/ready", "/ping"}
ODD_SPELLINGS = [
    "//v1/models", "/V1/models", "/v1/../v1/models", "/%761/models", "/v1/models/", "/v1//models", "/v1/./models",
    "/v1/chat/completions/", "/%76%31/chat/completions", "v1/models", "", "*",
]  # fmt: skip


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.pattern}")
def test_every_route_but_health_needs_the_key(route) -> None:
    api = make_api(api_keys=("K",))
    path = route.pattern.replace("{id}", "m")
    response = call(api, route.method, path)
    if route.pattern in OPEN:
        assert response.status == 200
        return
    if route.errors is ANTHROPIC_ERRORS:
        assert refused_anthropic(response, 401)["type"] == "authentication_error"
    else:
        assert refused(response, 401)["code"] == "invalid_api_key"
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert call(api, route.method, path, headers={"authorization": "Bearer K"}).status != 401


@pytest.mark.parametrize("path", ODD_SPELLINGS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_odd_spellings_reach_no_handler(path: str, method: str) -> None:
    api = make_api(api_keys=("K",))
    refused(call(api, method, path, {"messages": HELLO}), 401)
    refused(call(api, method, path, {"messages": HELLO}, {"authorization": "Bearer K"}), 404)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer K"}, 200),
        ({"authorization": "bearer K"}, 200),
        ({"authorization": "BEARER  K"}, 200),
        ({"x-api-key": "K"}, 200),
        ({"authorization": "Bearer L"}, 200),
        ({"authorization": "Bearer k"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Basic K"}, 401),
        ({"authorization": "K"}, 401),
        ({"authorization": "Bearer K L"}, 401),
        ({"authorization": "Bearer Ké"}, 401),
        ({"authorization": "Bearer \udce9"}, 401),
        ({"x-api-key": "\udcff"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_authorization_header(headers: dict[str, str], status: int) -> None:
    assert call(make_api(api_keys=("K", "L")), "GET", "/v1/models", headers=headers).status == status


def test_any_key_passes_when_none_is_set() -> None:
    assert call(make_api(), "GET", "/v1/models", headers={"authorization": "Bearer DUMMY"}).status == 200


def test_unknown_paths_and_wrong_methods() -> None:
    api = make_api()
    refused(call(api, "GET", "/nope"), 404)
    for method, path, allow in (
        ("GET", CHAT, "OPTIONS, POST"),
        ("HEAD", CHAT, "OPTIONS, POST"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/a/b", "GET, HEAD, OPTIONS"),
        ("BREW", "/health", "GET, HEAD, OPTIONS"),
    ):
        response = call(api, method, path)
        refused(response, 405)
        assert response.headers["Allow"] == allow


def test_head_and_options_follow_from_the_table() -> None:
    api = make_api(api_keys=("K",))
    assert call(api, "HEAD", "/health").status == 200
    for path in (CHAT, "/health", "*", "/nope"):
        response = call(api, "OPTIONS", path)
        assert response.status == 204 and "OPTIONS" in response.headers["Allow"]


def test_model_ids_may_hold_slashes() -> None:
    api = make_api(served_model_names=("org/m", "short"))
    assert [entry["id"] for entry in value(call(api, "GET", "/v1/models"))["data"]] == ["org/m", "short"]
    for path in ("/v1/models/org/m", "/v1/models/org%2Fm"):
        found = value(call(api, "GET", path))
        assert found["id"] == "org/m" and found["object"] == "model" and found["max_model_len"] == 200
    assert refused(call(api, "GET", "/v1/models/other"), 404)["code"] == "model_not_found"


def test_request_ids_come_back_and_cannot_split_headers() -> None:
    api = make_api()
    assert call(api, "GET", "/health", headers={"x-request-id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
    dirty = call(api, "GET", "/health", headers={"x-request-id": "a\r\nSet-Cookie: b\x1b[31m"}).headers["x-request-id"]
    assert dirty == "aSet-Cookie:b31m"
    assert len(call(api, "GET", "/health", headers={"x-request-id": "y" * 10**6}).headers["x-request-id"]) == 128
    made_up = {call(api, "GET", path).headers["x-request-id"] for path in ("/health", "/nope", "/v1/models")}
    assert len(made_up) == 3
    answer = call(api, "POST", CHAT, {"messages": HELLO}, {"x-request-id": "mine"})
    assert value(answer)["id"] == "chatcmpl-mine" and answer.headers["x-request-id"] == "mine"


def test_equal_request_ids_do_not_collide_in_the_engine() -> None:
    engine = EngineDouble()
    api = make_api(engine)
    for _ in range(2):
        assert call(api, "POST", CHAT, {"messages": HELLO}, {"x-request-id": "same"}).status == 200
    assert len({request.request_id for request in engine.requests}) == 2


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.x+json", 200),
        (None, 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=latin-1", 415),
        ('application/json; charset="UTF-8"', 200),
        (";;;", 415),
    ],
)
def test_content_types(content_type: str | None, status: int) -> None:
    response = call(make_api(), "POST", CHAT, {"messages": HELLO}, {"content-type": content_type})
    assert response.status == status
    if status != 200:
        refused(response, status)


def test_health_says_what_the_engine_is_doing() -> None:
    engine = EngineDouble()
    api = make_api(engine)
    assert value(call(api, "GET", "/health")) == {"status": "ok"}
    api.engine = None
    for path in ("/health", "/health/ready"):
        response = call(api, "GET", path)
        assert response.status == 503 and response.headers["Retry-After"]
        assert value(response) == {"status": "starting", "reason": None}
    assert call(api, "GET", "/health/live").status == 200
    api.engine = engine  # type: ignore[assignment]
    api.draining = True
    assert value(call(api, "GET", "/health"))["status"] == "draining"
    engine.state, engine.reason = HealthState.DEAD, "killed by signal 9"
    assert value(call(api, "GET", "/health")) == {"status": "dead", "reason": "killed by signal 9"}
    assert call(api, "GET", "/health/live").status == 503


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", CHAT), ("POST", "/tokenize")])
def test_503_with_retry_after_while_not_ready(method: str, path: str) -> None:
    engine = EngineDouble()
    api = make_api(engine)
    for state in ("starting", "draining", "dead"):
        api.engine = None if state == "starting" else engine  # type: ignore[assignment]
        api.draining = state == "draining"
        engine.state = HealthState.DEAD if state == "dead" else HealthState.HEALTHY
        response = call(api, method, path, {})
        assert refused(response, 503)["code"] == f"engine_{state}" and response.headers["Retry-After"]
    refused(call(api, "GET", "/nope"), 404)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("full", 2.2), 429, "queue_full"),
        (EngineDeadError("gone"), 503, "engine_unavailable"),
        (InvalidRequestError("too big for the pool", None, "x"), 400, "x"),
        (RuntimeError("secret internals"), 500, "internal_error"),
    ],
)
def test_what_the_engine_refuses(error: Exception, status: int, code: str, stream: bool) -> None:
    engine = EngineDouble()
    engine.refuse = error
    response = call(make_api(engine), "POST", COMPLETIONS, {"prompt": "x", "stream": stream})
    body = refused(response, status)
    assert body["code"] == code and "secret" not in body["message"]
    if status == 429:
        assert response.headers["Retry-After"] == "3"
    if status == 400:
        assert body["param"] == "prompt"


def test_when_one_prompt_is_refused_the_others_are_aborted() -> None:
    engine = EngineDouble(script=None)
    engine.refuse, engine.refuse_after = QueueFullError("full"), 2
    response = call(make_api(engine), "POST", COMPLETIONS, {"prompt": ["a", "b", "c"]})
    refused(response, 429)
    assert len(engine.requests) == 2 and engine.sinks == {}


def test_cors_is_off_by_default_and_exact_when_on() -> None:
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    closed = call(make_api(), "OPTIONS", CHAT, headers=asked)
    assert not [name for name in closed.headers if name.startswith("Access-Control")]
    api = make_api(allowed_origins=("https://a.example",), api_keys=("K",))
    preflight = call(api, "OPTIONS", CHAT, headers=asked)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert preflight.headers["Access-Control-Allow-Headers"] == asked["access-control-request-headers"]
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    refusal = call(api, "GET", "/v1/models", headers={"origin": "https://a.example"})
    assert refusal.status == 401 and refusal.headers["Access-Control-Allow-Origin"] == "https://a.example"
    other = call(api, "OPTIONS", CHAT, headers={**asked, "origin": "https://b.example"})
    assert "Access-Control-Allow-Origin" not in other.headers
    wild = call(make_api(allowed_origins=("*",)), "GET", "/health", headers={"origin": "https://b.example"})
    assert wild.headers["Access-Control-Allow-Origin"] == "*"
    split = {**asked, "access-control-request-headers": "x\r\nSet-Cookie: y"}
    assert "Set-Cookie" not in str(call(api, "OPTIONS", CHAT, headers=split).headers)


def test_version() -> None:
    assert value(call(make_api(), "GET", "/version"))["version"].count(".") == 2


@pytest.mark.parametrize("path", ["/v1/models", "/api/v1/models"])
def test_paths_work_with_and_without_the_root_path(path: str) -> None:
    api = make_api(root_path="/api")
    assert call(api, "GET", path).status == 200
    assert value(call(api, "GET", "/openapi.json"))["servers"] == [{"url": "/api"}]


@pytest.mark.parametrize("path", ["/api//v1/models", "/api/api/v1/models", "/apiv1/models", "/api", "/API/v1/models"])
def test_no_odd_spelling_slips_by_below_a_root_path(path: str) -> None:
    api = make_api(root_path="/api", api_keys=("K",))
    refused(call(api, "GET", path), 401)
    refused(call(api, "GET", path, headers={"authorization": "Bearer K"}), 404)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_timeout_that_cannot_be_meant(seconds: str) -> None:
    response = call(make_api(), "POST", CHAT, {"messages": HELLO}, {"x-request-timeout": seconds})
    assert refused(response)["param"] == "x-request-timeout"


@pytest.mark.parametrize(("limit", "asked"), [(0.05, None), (None, "0.05"), (30.0, "0.05"), (0.05, "30")])
def test_a_request_that_takes_too_long_is_ended(limit: float | None, asked: str | None) -> None:
    engine = EngineDouble(script=None)  # says nothing
    api = make_api(engine, request_timeout_s=limit)
    response = call(api, "POST", CHAT, {"messages": HELLO}, {"x-request-timeout": asked})
    error = refused(response, 504)
    assert (error["code"], error["type"]) == ("request_timeout", "server_error") and "0.05 s" in error["message"]
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    engine = EngineDouble(script=None)
    api = make_api(engine, request_timeout_s=0.05)

    async def main() -> bytes:
        response = await acall(api, "POST", CHAT, {"messages": HELLO, "stream": True})
        engine.say("so far")
        assert isinstance(response.body, FrameStream)
        return b"".join([frames async for frames in response.body])

    found = events(asyncio.run(main()))
    assert found[-1]["error"]["code"] == "request_timeout" and "0.05 s" in found[-1]["error"]["message"]
    assert found[-2]["choices"][0]["delta"]["content"] == "so far"
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_request_in_time_is_left_alone() -> None:
    response = call(make_api(request_timeout_s=30), "POST", CHAT, {"messages": HELLO})
    assert value(response)["choices"][0]["message"]["content"] == "Hello!"
