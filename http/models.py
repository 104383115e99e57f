"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from slipring.http.exchange import ApiResponse
from slipring.http.served import ServedModel


def list_models(model: ServedModel) -> ApiResponse:
    return ApiResponse.json({"object": "list", "data": [_entry(model, name) for name in model.names]})


def get_model(model: ServedModel, name: str) -> ApiResponse:
    return ApiResponse.json(_entry(model, model.check_name(name)))


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "slipring",
        "root": model.engine.spec.name,
        "parent": None,
        "max_model_len": model.engine.max_model_len,
    }
