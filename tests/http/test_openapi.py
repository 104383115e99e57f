"""/openapi.json says what the code does: its routes, its bodies, its limits and its statuses."""

from __future__ import annotations

from typing import Any

import pytest

from slipring.http.config import ServerConfig
from slipring.http.openapi import document, statuses
from slipring.http.ranges import RANGES
from slipring.http.route_table import Route, RouteTable
from slipring.http.routes import ROUTES
from tests.http.calls import CHAT, HELLO, call, make_api, refused, value


def described(**config: Any) -> dict[str, Any]:
    response = call(make_api(**config), "GET", "/openapi.json")
    assert response.status == 200
    return value(response)


def test_every_route_is_described_with_its_body_and_statuses() -> None:
    paths = described()["paths"]
    assert {(method.upper(), path) for path in paths for method in paths[path]} == {
        (route.method, route.pattern) for route in ROUTES
    }
    for route in ROUTES:
        operation = paths[route.pattern][route.method.lower()]
        assert set(operation["responses"]) == set(map(str, statuses(route, keys=False)))
        assert ("requestBody" in operation) == bool(route.bodies)
    assert len({o["operationId"] for methods in paths.values() for o in methods.values()}) == len(ROUTES)


def test_keys_are_told_where_they_are_asked_for() -> None:
    assert "401" not in str(described())
    found = document(ROUTES, ServerConfig(served_model_names=("m",), api_keys=("K",)))
    for route in ROUTES:
        operation = found["paths"][route.pattern][route.method.lower()]
        assert ("401" in operation["responses"]) == ("security" in operation) == route.needs_key


def test_streams_are_described() -> None:
    chat = described()["paths"][CHAT]["post"]["responses"]["200"]["content"]
    assert set(chat) == {"application/json", "text/event-stream; charset=utf-8"}


@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "seed", "min_tokens", "repetition_penalty"])
def test_limits_told_are_limits_checked(name: str) -> None:
    schema = described()["components"]["schemas"]["ChatBody"]["properties"][name]["anyOf"][0]
    limits = RANGES[name]
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    assert (low, schema.get("maximum")) == (limits.least, limits.most)
    api = make_api()
    bad = [low - 1] + ([schema["maximum"] + 1] if "maximum" in schema else [])
    for number in bad:
        assert refused(call(api, "POST", CHAT, {"messages": HELLO, name: number}))["param"] == name
    good = schema["maximum"] if "maximum" in schema else low + 1
    assert call(api, "POST", CHAT, {"messages": HELLO, name: good}).status == 200


def test_roles_told_are_roles_taken() -> None:
    roles = described()["components"]["schemas"]["Message"]["properties"]["role"]["enum"]
    for role in roles:
        assert call(make_api(), "POST", CHAT, {"messages": [{"role": role, "content": "x"}]}).status == 200


def test_patterns_match_the_longer_end_first() -> None:
    async def nothing(*_: Any) -> Any: ...

    patterns = ("/r", "/r/{id}", "/r/{id}/cancel")
    table = RouteTable(tuple(Route("GET", pattern, nothing, "") for pattern in patterns))
    found = {path: table.match(path) for path in ("/r", "/r/a", "/r/a%2Fb/cancel", "/r/cancel", "/r/", "/x")}
    seen = {path: (routes["GET"].pattern if routes else None, rest) for path, (routes, rest) in found.items()}
    assert seen == {
        "/r": ("/r", ""), "/r/a": ("/r/{id}", "a"), "/r/a%2Fb/cancel": ("/r/{id}/cancel", "a/b"),
        "/r/cancel": ("/r/{id}", "cancel"), "/r/": (None, ""), "/x": (None, ""),
    }  # fmt: skip
