"""`document`: the OpenAPI description of the table of routes, made from what the code itself goes by.

Bodies are the structs that requests are decoded with (`bodies.py`), their limits those that are checked
(`ranges.py`), and statuses follow from the routes. Answers are described by content type only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from slipring.http.config import ServerConfig
from slipring.http.exchange import EVENT_STREAM, JSON
from slipring.http.ranges import KEYWORDS, RANGES
from slipring.http.route_table import Route
from slipring.http.served import VERSION

_REF = "#/components/schemas/{name}"
_DESCRIPTIONS = {
    200: "The answer.",
    202: "Accepted; what becomes of it is told elsewhere.",
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "A valid API key is needed.",
    404: "What is named does not exist here.",
    405: "The method is not allowed; `Allow` names those that are.",
    408: "The body did not arrive in time.",
    409: "Not in this state.",
    413: "The body is too large.",
    415: "The body must be JSON in UTF-8.",
    429: "Too much is waiting already; `Retry-After` says when to try again.",
    500: "The server hit an unexpected error.",
    503: "The model is loading, the server is shutting down, or the engine has stopped.",
    504: "The request's time is over.",
}


def document(routes: Iterable[Route], config: ServerConfig) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    routes = tuple(routes)
    bodies = list(dict.fromkeys(body for route in routes for body in route.bodies))
    refs, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    ref_of = dict(zip(bodies, refs, strict=True))
    for name, schema in schemas.items():
        _tell_limits(name, schema)
    schemas.update({route.errors.name: route.errors.schema for route in routes})
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.pattern, {})[route.method.lower()] = _operation(route, ref_of, bool(config.api_keys))
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Slipring", "version": VERSION},
        "servers": [{"url": config.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": dict(sorted(schemas.items()))},
    }
    if config.api_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _operation(route: Route, ref_of: dict[type, dict[str, Any]], keys: bool) -> dict[str, Any]:
    asks_key = keys and route.needs_key
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', route.pattern)}".rstrip("_"),
        "parameters": _parameters(route),
        "responses": {str(status): _response(route, status) for status in statuses(route, keys)},
    }
    if refs := [ref_of[body] for body in route.bodies]:
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        operation["requestBody"] = {"required": not route.body_optional, "content": {JSON: {"schema": schema}}}
    if asks_key:
        operation["security"] = [{"key": []}]
    return operation


def statuses(route: Route, keys: bool) -> list[int]:
    """Every status that a route may answer with; `keys`: API keys are set."""
    found = {200, 405, 500, *route.statuses}
    if keys and route.needs_key:
        found.add(401)
    if route.needs_model:
        found.add(503)
    if route.query:
        found.add(400)
    if route.method == "POST":
        found.add(415)
    if route.bodies:
        found |= {400, 408, 413}
    return sorted(found)


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", route.pattern)
    ]
    told = [(parameter.name, parameter.schema, parameter.description) for parameter in route.query]
    found += [{"name": name, "in": "query", "schema": schema, "description": text} for name, schema, text in told]
    return found


def _response(route: Route, status: int) -> dict[str, Any]:
    description = _DESCRIPTIONS[status]
    if status >= 300:
        # A probe's 503 is its answer.
        probe = status == 503 and not route.needs_model
        schema = {"type": "object"} if probe else {"$ref": _REF.format(name=route.errors.name)}
        return {"description": description, "content": {JSON: {"schema": schema}}}
    content: dict[str, Any] = {route.answer: {"schema": {"type": "object"} if route.answer == JSON else {}}}
    if route.streams:
        content[EVENT_STREAM] = {"schema": {}}  # of each event, and each API has many kinds
    return {"description": description, "content": content}


def _tell_limits(name: str, schema: dict[str, Any]) -> None:
    for field, described in schema.get("properties", {}).items():
        described.update(KEYWORDS.get((name, field), {}))
        limits = RANGES.get(field)
        for kind in described.get("anyOf", [described]):
            if limits is not None and kind.get("type") in ("integer", "number"):
                kind.update(limits.keywords())
