"""Fixtures: a small model, and real `slipring serve` processes, made once for all who only talk to them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.serving import Server
from tests.small_model import save_small_model

# As the supervisor sets it for workers: OpenMP threads that spin at barriers take ten times as long on shared cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if "PYTEST_XDIST_WORKER" in os.environ:  # the other processes have the other cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a random model with SmolLM2's tokenizer."""
    return save_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def small_server(small_model: str) -> Iterator[str]:
    """Base URL of a server with the small model in float32. For clients that leave it as they found it."""
    flags = "--dtype", "float32", "--cpu-threads", "1", "--served-model-name", "smollm2"
    with Server(*flags, model=small_model) as running:
        yield running.url


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Base URL of a server with the real model in float32. For clients that leave it as they found it."""
    with Server("--dtype", "float32", "--cpu-threads", "1") as running:
        yield running.url
