"""`Api.handle`: the order in which a request is judged, before and around the handlers of `routes.py`.

    route → OPTIONS → key → method → readiness → content type → body → handler

The key comes before anything that says which routes exist. Paths match as they were sent, byte for byte, so no odd
spelling reaches a handler. Every answer carries x-request-id; every failure carries the error body of its API; 405,
HEAD and OPTIONS follow from the table.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from typing import TYPE_CHECKING, Any

from slipring.http.auth import Cors, KeyRing
from slipring.http.config import ServerConfig
from slipring.http.errors import OPENAI_ERRORS, ApiError, ErrorStyle, internal_error, not_ready
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.generation import Flights
from slipring.http.metrics import RequestCounter
from slipring.http.openapi import document
from slipring.http.record import record
from slipring.http.reporter import Reporter
from slipring.http.responses import Responses
from slipring.http.route_table import Route, allowed_methods
from slipring.http.routes import NOT_SERVED, ROUTES, TABLE
from slipring.http.served import ServedModel
from slipring.http.stream import FrameStream

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
UNMATCHED = "unmatched"


class Api:
    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.engine: Engine | None = None
        self.model: ServedModel | None = None
        self.draining = False
        self.flights = Flights()
        self.responses = Responses(config)
        self.counter = RequestCounter()
        self.reporters: tuple[Reporter, ...] = ()
        """Are told of every request that has ended."""
        self._keys = KeyRing(config.api_keys)
        self._cors = Cors(config.allowed_origins)

    def serve(self, engine: Engine) -> None:
        """The engine has started: answer from now on."""
        self.model = ServedModel(engine, self.config)
        self.engine = engine

    def state(self) -> tuple[str, str | None]:
        """`starting`, `healthy`, `unhealthy`, `draining` or `dead`, and why."""
        if self.engine is None:
            return ("draining" if self.draining else "starting"), None
        now = self.engine.health()
        if self.draining and now.state.value != "dead":
            return "draining", None
        return now.state.value, now.reason

    def description(self) -> dict[str, Any]:
        """The OpenAPI document of this very API."""
        return document(ROUTES, self.config)

    async def handle(self, request: ApiRequest) -> ApiResponse:
        """Never raises, except when the client has gone (cancelled, or a ConnectionError while reading)."""
        request.began, request.began_ns = time.monotonic(), time.time_ns()
        request.path = self._below_root(request.path)
        request.request_id = _request_id(request.headers.get("x-request-id", ""))
        routes, rest = TABLE.match(request.path)
        known = next(iter(routes.values()), None)
        name, errors = (known.pattern, known.errors) if known else (UNMATCHED, OPENAI_ERRORS)
        response = await self._answer(request, routes, rest, errors)
        response.headers.update(dict.fromkeys(errors.id_headers, request.request_id))
        response.headers.update(self._cors.headers(request))
        self.counter.count(request.method, name, response.status)
        return response

    async def _answer(
        self, request: ApiRequest, routes: dict[str, Route], rest: str, errors: ErrorStyle
    ) -> ApiResponse:
        try:
            if request.method == "OPTIONS":
                return self._options(request, routes)
            route = self._choose(request, routes)
            return await self._in_time(request, route, rest)
        except ApiError as error:
            return errors.write(error)
        except ConnectionError:
            raise  # the client left while sending: there is nobody to answer
        except Exception:
            logger.exception("%s %s failed", request.method, request.path[:200])
            return errors.write(internal_error())

    def ended(self, request: ApiRequest, response: ApiResponse | None) -> None:
        """The answer is out, or (None, or a stream that was cancelled) its client has gone. Called once by the face."""
        if request.deadline is not None:
            request.deadline.cancel()
        routes, _ = TABLE.match(request.path)
        route = next(iter(routes.values()), None)
        name = route.pattern if route else UNMATCHED
        self.counter.observe(name, time.monotonic() - request.began)
        if self.reporters:
            told = record(request, name, route.operation if route else None, response)
            for reporter in self.reporters:
                reporter.add(told)

    async def _in_time(self, request: ApiRequest, route: Route, rest: str) -> ApiResponse:
        """Call the handler; what takes longer than allowed ends with a 504, or its stream with an error."""
        seconds = self._seconds_allowed(request)
        if seconds is None:
            return await route.handler(self, request, rest)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        message = f"The request took longer than the {seconds:g} s that it may take."
        too_late = ApiError(504, message, code="request_timeout")
        try:
            async with asyncio.timeout_at(deadline):
                response = await route.handler(self, request, rest)
        except TimeoutError:
            raise too_late from None
        if isinstance(response.body, FrameStream):
            request.deadline = loop.call_at(deadline, response.body.fail, too_late)
        return response

    def _seconds_allowed(self, request: ApiRequest) -> float | None:
        """The server's limit, or the client's own if that is less. Raises ApiError."""
        limit, asked = self.config.request_timeout_s, request.headers.get(TIMEOUT_HEADER)
        if asked is None:
            return limit
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise ApiError(400, f"{TIMEOUT_HEADER} must be a number of seconds above 0.", TIMEOUT_HEADER)
        return seconds if limit is None else min(seconds, limit)

    def _below_root(self, path: str) -> str:
        root = self.config.root_path
        return path[len(root) :] if root and path.startswith(f"{root}/") else path

    def _options(self, request: ApiRequest, routes: dict[str, Route]) -> ApiResponse:
        allow = allowed_methods(routes)
        headers = {"Allow": allow, **self._cors.preflight(request, allow)}
        return ApiResponse(204, b"", headers)

    def _choose(self, request: ApiRequest, routes: dict[str, Route]) -> Route:
        """Raises ApiError unless this request may go to a handler."""
        method = "GET" if request.method == "HEAD" else request.method
        route = routes.get(method)
        if route is None or route.needs_key:
            self._keys.check(request)
        if not routes:
            reason = NOT_SERVED.get(request.path, f"There is no {request.path[:200]!r} here.")
            raise ApiError(404, reason, code="not_found")
        if route is None:
            allow = allowed_methods(routes)
            message = f"{request.method[:20]} is not allowed on {request.path[:200]!r}; allowed: {allow}."
            raise ApiError(405, message, code="method_not_allowed", headers={"Allow": allow})
        state, reason = self.state()
        if route.needs_model and state in ("starting", "draining", "dead"):
            # An unhealthy engine decides itself what it still takes: requests may wait for the next worker.
            raise not_ready(state, reason)
        if method == "POST":
            _check_content_type(request, route)
        return route


def _request_id(given: str) -> str:
    """The client's id without anything that could split a header or a log line; else one of our own."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given)[:128] or secrets.token_hex(16)


def _check_content_type(request: ApiRequest, route: Route) -> None:
    """JSON in UTF-8.

    A missing header is refused where there is a body to read, and to browsers in any case: a web page can send such
    a request to any origin, unasked.
    """
    header = request.headers.get("content-type")
    if header is None:
        if (route.body_optional or not route.bodies) and "origin" not in request.headers:
            return
        header = "nothing"
    kind, *options = (part.strip().lower() for part in header.split(";"))
    charsets = [option.partition("=")[2].strip('"') for option in options if option.startswith("charset=")]
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    if any(charset not in ("utf-8", "utf8", "us-ascii") for charset in charsets):
        raise ApiError(415, "The charset must be utf-8.", code="unsupported_media_type")
