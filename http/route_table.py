"""What a route is, and which one a path means (`routes.py` has them all).

A pattern is a path in which one `{name}` stands for anything, slashes included; exact paths win, and among patterns
those with the longer end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from slipring.http.errors import OPENAI_ERRORS, ErrorStyle
from slipring.http.exchange import JSON, ApiRequest, ApiResponse

Handler = Callable[[Any, ApiRequest, str], Awaitable[ApiResponse]]
"""The first argument is the Api, the last what the path's `{...}` stands for."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the query string."""

    name: str
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    pattern: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] = ()
    """What the handler decodes the body with, or one of several; empty: it reads none."""
    body_optional: bool = False
    query: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = ()
    """The handler's own refusals. Those of keys, bodies and readiness follow from the other fields."""
    answer: str = JSON
    """Content type of a 200."""
    operation: str | None = None
    """What the model does for it, in OpenTelemetry's words for generative AI."""
    streams: bool = False
    """`stream: true` in the body makes the answer an event stream."""
    needs_key: bool = True
    needs_model: bool = True
    """503 until the model is loaded, and again from the beginning of a shutdown on."""
    administers: bool = False
    """Changes the server for everybody."""
    errors: ErrorStyle = OPENAI_ERRORS
    """The same for all routes of a path."""

    @property
    def bodies(self) -> tuple[type[msgspec.Struct], ...]:
        return self.body if isinstance(self.body, tuple) else (self.body,)


class RouteTable:
    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: dict[tuple[str, str], dict[str, Route]] = {}
        for route in routes:
            prefix, brace, rest = route.pattern.partition("{")
            key = (prefix, rest.partition("}")[2])
            same = self._patterns.setdefault(key, {}) if brace else self._exact.setdefault(prefix, {})
            same[route.method] = route
        self._ordered = sorted(self._patterns.items(), key=lambda item: -len(item[0][1]))

    def match(self, path: str) -> tuple[dict[str, Route], str]:
        """The routes of a path by method, and what its `{...}` stands for. The path is matched as it was sent."""
        if routes := self._exact.get(path):
            return routes, ""
        for (prefix, end), routes in self._ordered:
            if len(path) > len(prefix) + len(end) and path.startswith(prefix) and path.endswith(end):
                return routes, unquote(path[len(prefix) : len(path) - len(end)])
        return {}, ""


def allowed_methods(routes: dict[str, Route]) -> str:
    """The Allow header. No routes: `OPTIONS *`, and preflights of unknown paths."""
    methods = set(routes) or {"GET", "POST"}
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods | {"OPTIONS"}))
