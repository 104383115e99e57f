"""Calls into the framework-free API, as a face would make them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from slipring.http.api import Api
from slipring.http.config import ServerConfig
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.stream import FrameStream
from tests.http.engine_double import EngineDouble

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def make_api(engine: EngineDouble | None = None, **config: Any) -> Api:
    """An API over a double (a fresh one by default) that serves the model `m`."""
    api = Api(ServerConfig(**{"served_model_names": ("m",), **config}))
    api.serve(engine or EngineDouble())  # type: ignore[arg-type]
    return api


async def acall(
    api: Api, method: str, target: str, body: Any = None, headers: dict[str, str | None] | None = None
) -> ApiResponse:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    path, _, query = target.partition("?")
    headers = {"content-type": "application/json", **(headers or {})}
    headers = {name: text for name, text in headers.items() if text is not None}  # None: leave it out
    return await api.handle(ApiRequest(method, path, headers, query=query, body=data))


def call(
    api: Api, method: str, target: str, body: Any = None, headers: dict[str, str | None] | None = None
) -> ApiResponse:
    return asyncio.run(acall(api, method, target, body, headers))


def value(response: ApiResponse) -> Any:
    assert isinstance(response.body, bytes)
    return json.loads(response.body)


def refused(response: ApiResponse, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, whose envelope is checked."""
    assert response.status == status, response.body
    body = value(response)
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"]
    if status == 400:
        assert error["type"] == "invalid_request_error"
    return error


def refused_anthropic(response: ApiResponse, status: int = 400) -> dict[str, Any]:
    """As `refused`, in the shape of Anthropic's API."""
    assert response.status == status, response.body
    assert response.headers["request-id"] == response.headers["x-request-id"]
    body = value(response)
    assert body["type"] == "error" and body.keys() == {"type", "error"}
    error = body["error"]
    assert error.keys() == {"type", "message"} and isinstance(error["message"], str) and error["message"]
    return error


def stream_bytes(api: Api, target: str, body: dict[str, Any]) -> bytes:
    """Everything that a streamed answer sends, taken by iteration."""

    async def main() -> bytes:
        response = await acall(api, "POST", target, {**body, "stream": True})
        assert isinstance(response.body, FrameStream), response.body
        return b"".join([frames async for frames in response.body])

    return asyncio.run(main())


def named_events(data: bytes) -> list[dict[str, Any]]:
    """Decoded events of APIs that name them; the name and the type agree."""
    found = []
    for block in data.decode("utf-8").split("\n\n")[:-1]:
        name, line = block.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def events(data: bytes) -> list[Any]:
    """Decoded events; the final [DONE] stays a string."""
    found = []
    for block in data.decode("utf-8").split("\n\n")[:-1]:
        assert block.startswith("data: ")
        found.append("[DONE]" if block == "data: [DONE]" else json.loads(block[6:]))
    return found
