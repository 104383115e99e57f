"""Tests of the outside face talk to a server whose model is small: its words are random, and cheap."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def server(small_server: str) -> str:
    """Base URL. For clients that leave it as they found it."""
    return small_server
