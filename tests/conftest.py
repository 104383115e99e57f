"""Fixtures: a real `slipring serve` process, made once for all who only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Server


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Base URL of a server with the real model in float32. For clients that leave it as they found it."""
    with Server("--dtype", "float32") as running:
        yield running.url
