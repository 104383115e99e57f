"""Tests of the outside face talk to a server whose model is small: its words are random, and cheap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Server
from tests.small_model import save_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def server(small_model: str) -> Iterator[str]:
    """Base URL. For clients that leave it as they found it."""
    with Server("--dtype", "float32", "--cpu-threads", "1", model=small_model) as running:
        yield running.url
