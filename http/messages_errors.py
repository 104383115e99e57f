"""Errors as Anthropic's API writes them: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from typing import Any

from slipring.http.errors import ApiError, ErrorStyle
from slipring.http.exchange import ApiResponse

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def error_body(error: ApiError) -> dict[str, Any]:
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words by which Claude Code knows that it must compact
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _write(error: ApiError) -> ApiResponse:
    return ApiResponse.json(error_body(error), error.status, error.headers)


ANTHROPIC_ERRORS = ErrorStyle(
    "MessagesError",
    _write,
    {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
    id_headers=("x-request-id", "request-id"),
)
