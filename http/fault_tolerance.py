"""POST /v1/fault_tolerance/apply and GET /v1/fault_tolerance/status, in vLLM's shapes; also without /v1.

They exist with `--enable-fault-tolerance` only, and always behind the key. A command that is malformed, or names ranks
that there are not, is a 400. Any other is answered with 202 at once, whatever becomes of it, for what it may do depends
on states that change meanwhile: `status` tells, under its rank's `last_command`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from slipring.http.body_depth import check_depth
from slipring.http.errors import ApiError, bad_request
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.runtime.fault_tolerance import INSTRUCTIONS, BadCommand, FaultToleranceRequest

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

logger = logging.getLogger(__name__)

_running: set[asyncio.Task[Any]] = set()
"""A task that nobody holds may be collected in the middle of its work."""


class ApplyBody(msgspec.Struct):
    """For the description of the API; `read_command` decodes by hand, for vLLM's words."""

    instruction: str
    params: dict[str, Any] = {}
    request_id: str | None = None


async def apply(engine: Engine, request: ApiRequest) -> ApiResponse:
    command = read_command(await request.read())
    try:
        engine.fault_tolerance.check(command)
    except BadCommand as error:
        raise bad_request(f"{error}.", error.param) from None
    task = asyncio.ensure_future(engine.fault_tolerance.apply(command))
    _running.add(task)
    task.add_done_callback(_done)
    path = request.path.removesuffix("apply") + "status"
    body = {"message": f"Request accepted; poll {path} for updates.", "request_id": command.request_id}
    return ApiResponse.json(body, 202)


async def status(engine: Engine) -> ApiResponse:
    return ApiResponse.json(engine.fault_tolerance.status())


def read_command(data: bytes) -> FaultToleranceRequest:
    """Raises ApiError (400)."""
    check_depth(data)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise bad_request("Invalid JSON format") from None
    if not isinstance(body, dict):
        raise bad_request("Request body must be a JSON object.")
    instruction = body.get("instruction")
    if not instruction:
        raise bad_request("'instruction' is required.", "instruction")
    if instruction not in INSTRUCTIONS:
        known = ", ".join(INSTRUCTIONS)
        raise bad_request(f"Invalid instruction: {str(instruction)[:100]!r}. Known: {known}.", "instruction")
    params = body.get("params")
    if params is not None and not isinstance(params, dict):
        raise bad_request("'params' must be an object.", "params")
    request_id = body.get("request_id", str(uuid.uuid4()))
    if not isinstance(request_id, str) or not request_id.strip() or len(request_id) > 256:
        raise bad_request("'request_id' must be a string of 1 to 256 characters.", "request_id")
    return FaultToleranceRequest(instruction, params or {}, request_id)


def check_enabled(enabled: bool, path: str) -> None:
    """Without the flag there is nothing here. Raises ApiError (404)."""
    if not enabled:
        raise ApiError(404, f"There is no {path!r} here (--enable-fault-tolerance).", code="not_found")


def _done(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a fault-tolerance command failed", exc_info=error)
