"""GET|HEAD /health (also /health/ready): may I send work? GET|HEAD /health/live: is the process worth keeping?"""

from __future__ import annotations

from slipring.http.exchange import ApiResponse

_RETRY_AFTER = {"Retry-After": "1"}


def ready(state: str, reason: str | None) -> ApiResponse:
    if state == "healthy":
        return ApiResponse.json({"status": "ok"})
    answer = ApiResponse.json({"status": state, "reason": reason}, 503, _RETRY_AFTER)
    answer.expected = state == "starting"
    return answer


def live(state: str, reason: str | None) -> ApiResponse:
    """Only a dead engine is worth a restart: starting and draining are alive."""
    if state == "dead":
        return ApiResponse.json({"status": state, "reason": reason}, 503, _RETRY_AFTER)
    return ApiResponse.json({"status": "ok"})
