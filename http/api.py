"""`Api.handle`: one table of routes, and the order in which a request is judged.

    route → OPTIONS → key → method → readiness → content type → body → handler

The key comes before anything that says which routes exist. Paths match as they were sent, byte for byte, so no odd
spelling reaches a handler. Every answer carries x-request-id; every failure carries the OpenAI error body; 405, HEAD
and OPTIONS follow from the table.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from slipring.http import health, models, tokens
from slipring.http.auth import Cors, KeyRing
from slipring.http.chat import create_chat_completion
from slipring.http.completions import create_completion
from slipring.http.config import ServerConfig
from slipring.http.errors import ApiError, internal_error, not_ready
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.generation import Flights
from slipring.http.metrics import RequestCounter, exposition
from slipring.http.served import VERSION, ServedModel

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

logger = logging.getLogger(__name__)

Handler = Callable[["Api", ApiRequest, str], Awaitable[ApiResponse]]
"""The last argument is what the path's `{...}` stands for."""


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    pattern: str
    """A path; `{id}` takes what is there, slashes included."""
    handler: Handler
    needs_key: bool = True
    needs_model: bool = True
    """503 until the model is loaded, and again from the beginning of a shutdown on."""


class Api:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.model: ServedModel | None = None
        self.draining = False
        self.flights = Flights()
        self.counter = RequestCounter()
        self._keys = KeyRing(config.api_keys)
        self._cors = Cors(config.allowed_origins)

    def serve(self, engine: Engine) -> None:
        """The engine has started: answer from now on."""
        self.model = ServedModel(engine, self.config)
        self.engine = engine

    def state(self) -> tuple[str, str | None]:
        """`starting`, `healthy`, `draining` or `dead`, and why."""
        if self.engine is None:
            return ("draining" if self.draining else "starting"), None
        now = self.engine.health()
        if self.draining and now.state.value != "dead":
            return "draining", None
        return now.state.value, now.reason

    async def handle(self, request: ApiRequest) -> ApiResponse:
        """Never raises, except when the client has gone (cancelled, or a ConnectionError while reading)."""
        request.request_id = _request_id(request.headers.get("x-request-id", ""))
        route_name, response = await self._answer(request)
        response.headers["x-request-id"] = request.request_id
        response.headers.update(self._cors.headers(request))
        self.counter.count(request.method, route_name, response.status)
        return response

    async def _answer(self, request: ApiRequest) -> tuple[str, ApiResponse]:
        name = "unmatched"
        try:
            routes, rest = _match(request.path)
            if routes:
                name = next(iter(routes.values())).pattern
            if request.method == "OPTIONS":
                return name, self._options(request, routes)
            route = self._choose(request, routes)
            return name, await route.handler(self, request, rest)
        except ApiError as error:
            return name, error.response()
        except ConnectionError:
            raise  # the client left while sending: there is nobody to answer
        except Exception:
            logger.exception("%s %s failed", request.method, name)
            return name, internal_error().response()

    def _options(self, request: ApiRequest, routes: dict[str, Route]) -> ApiResponse:
        allow = _allow(routes)
        headers = {"Allow": allow, **self._cors.preflight(request, allow)}
        return ApiResponse(204, b"", headers)

    def _choose(self, request: ApiRequest, routes: dict[str, Route]) -> Route:
        """Raises ApiError unless this request may go to a handler."""
        method = "GET" if request.method == "HEAD" else request.method
        route = routes.get(method)
        if route is None or route.needs_key:
            self._keys.check(request)
        if not routes:
            raise ApiError(404, f"There is no {request.path[:200]!r} here.", code="not_found")
        if route is None:
            allow = _allow(routes)
            message = f"{request.method[:20]} is not allowed on {request.path[:200]!r}; allowed: {allow}."
            raise ApiError(405, message, code="method_not_allowed", headers={"Allow": allow})
        state, reason = self.state()
        if route.needs_model and state != "healthy":
            raise not_ready(state, reason)
        if method == "POST":
            _check_content_type(request.headers.get("content-type"))
        return route


def _match(path: str) -> tuple[dict[str, Route], str]:
    """The routes of a path by method, and what its `{id}` stands for."""
    if routes := _EXACT.get(path):
        return routes, ""
    for (before, after), routes in _WITH_ID.items():
        if path.startswith(before) and path.endswith(after) and len(path) > len(before) + len(after):
            return routes, unquote(path[len(before) : len(path) - len(after)])
    return {}, ""


def _allow(routes: dict[str, Route]) -> str:
    methods = set(routes) or {"GET", "POST"}  # no routes: `OPTIONS *` and preflights of unknown paths
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods | {"OPTIONS"}))


def _request_id(given: str) -> str:
    """The client's id without anything that could split a header or a log line; else one of our own."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:128] or secrets.token_hex(16)


def _check_content_type(header: str | None) -> None:
    """JSON in UTF-8. A missing header is refused: a web page can send such a request to any origin, unasked."""
    if header is None:
        header = "nothing"
    kind, *options = (part.strip().lower() for part in header.split(";"))
    charsets = [option.partition("=")[2].strip('"') for option in options if option.startswith("charset=")]
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    if any(charset not in ("utf-8", "utf8", "us-ascii") for charset in charsets):
        raise ApiError(415, "The charset must be utf-8.", code="unsupported_media_type")


# The table and its handlers.


def _served(api: Api) -> ServedModel:
    if api.model is None:
        raise not_ready("starting")
    return api.model


async def _completions(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await create_completion(_served(api), api.flights, request)


async def _chat(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await create_chat_completion(_served(api), api.flights, request)


async def _tokenize(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await tokens.tokenize(_served(api), request)


async def _detokenize(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await tokens.detokenize(_served(api), request)


async def _list_models(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return models.list_models(_served(api))


async def _get_model(api: Api, request: ApiRequest, name: str) -> ApiResponse:
    return models.get_model(_served(api), name)


async def _health(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return health.ready(*api.state())


async def _live(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return health.live(*api.state())


async def _metrics(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return exposition(api.engine, api.config.served_model_names[0], api.counter)


async def _version(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return ApiResponse.json({"version": VERSION})


ROUTES = (
    Route("GET", "/health", _health, needs_key=False, needs_model=False),
    Route("GET", "/health/ready", _health, needs_key=False, needs_model=False),
    Route("GET", "/health/live", _live, needs_key=False, needs_model=False),
    Route("GET", "/version", _version, needs_model=False),
    Route("GET", "/metrics", _metrics, needs_model=False),
    Route("GET", "/v1/models", _list_models),
    Route("GET", "/v1/models/{id}", _get_model),
    Route("POST", "/v1/completions", _completions),
    Route("POST", "/v1/chat/completions", _chat),
    Route("POST", "/tokenize", _tokenize),
    Route("POST", "/detokenize", _detokenize),
)

_EXACT: dict[str, dict[str, Route]] = {}
_WITH_ID: dict[tuple[str, str], dict[str, Route]] = {}
"""By what stands before and after the `{id}`; the longer ending is tried first."""
for _route in sorted(ROUTES, key=lambda route: -len(route.pattern.partition("}")[2])):
    _before, _brace, _rest = _route.pattern.partition("{id}")
    _found = _WITH_ID.setdefault((_before, _rest), {}) if _brace else _EXACT.setdefault(_before, {})
    _found[_route.method] = _route
