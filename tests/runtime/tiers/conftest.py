"""A tiny model, for what only looks at its description and its file."""

from __future__ import annotations

import pytest

from slipring.runtime.model import resolve_model
from slipring.shm.spec import ModelSpec
from tests.e2e.tier_rig import save_tiny_model


@pytest.fixture(scope="package")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return resolve_model(save_tiny_model(tmp_path_factory.mktemp("tiny")))
