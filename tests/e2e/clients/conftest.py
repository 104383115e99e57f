"""Clients talk to a server whose model is small: its words are random, and cheap. What the real model says through
every protocol is `test_answers.py`'s."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def server(small_server: str) -> str:
    return small_server
