"""schemathesis drives a real server by its own /openapi.json: no 5xx, no status that is not described.

Both inputs that fit the description and inputs that break it. Whatever would only make the model talk for long is
cut short before it is sent.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from slipring.http.route_table import Route
from slipring.http.routes import ROUTES
from tests.serving import alive

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW, MANY = 15, 2000
MOST = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2, "best_of": 2}
OPERATIONS = [pytest.param(route, id=f"{route.method} {route.pattern}") for route in ROUTES]


@functools.cache
def described(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def kept_short(body: Any) -> Any:
    """The same body, but never a long answer: numbers that would be allowed are made small, absent ones are set."""
    if not isinstance(body, dict):
        return body
    for name, most in MOST.items():
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = 2
    if body.get("max_output_tokens") is None:
        body["max_output_tokens"] = 2
    return body


def fuzz(url: str, route: Route, examples: int) -> None:
    operation = described(url)[route.pattern][route.method]
    session = requests.Session()

    @given(case=operation.as_strategy(GenerationMode.POSITIVE) | operation.as_strategy(GenerationMode.NEGATIVE))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def every_case(case: Case) -> None:
        if route.bodies:
            case.body = kept_short(case.body)
        case.validate_response(case.call(session=session), checks=CHECKS)

    try:
        every_case()
    finally:
        if route.administers:  # it may stand paused
            requests.post(f"{url}/resume", timeout=30)
    alive(url)


@pytest.mark.parametrize("route", OPERATIONS)
def test_a_few_of_every_operation(server: str, route: Route) -> None:
    fuzz(server, route, FEW if route.bodies else 5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("route", OPERATIONS)
def test_many_of_every_operation(server: str, route: Route) -> None:
    fuzz(server, route, MANY)
