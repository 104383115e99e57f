"""What an operator may do to a running server, over HTTP and behind the key. Names and answers are vLLM's.

    POST /pause?mode=&clear_cache=   abort: end what is running; wait: let it finish; keep: freeze it where it is
    POST /resume                     go on; what came in the meantime starts, what was frozen goes on
    POST /abort_requests             {"request_ids": [...]}, or everything: streams end with finish_reason `abort`
    POST /reset_prefix_cache?reset_external=   forget all KV blocks that nobody holds; true: the CPU tier's as well
    GET  /is_paused, /load

Requests that arrive while the server is paused are taken and wait, within the limits of the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from slipring.http.bodies import AbortBody, decode
from slipring.http.errors import bad_request
from slipring.http.exchange import ApiRequest, ApiResponse

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

PAUSE_MODES = ("abort", "wait", "keep")
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


async def pause(engine: Engine, request: ApiRequest) -> ApiResponse:
    query = dict(parse_qsl(request.query, keep_blank_values=True))
    mode = query.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise bad_request(f"`mode` must be one of {', '.join(PAUSE_MODES)}; got {mode[:40]!r}.", "mode")
    clear = _flag(query, "clear_cache", "true")
    engine.pause(freeze=mode == "keep")
    if mode == "abort":
        _abort(engine, engine.live_ids)
    elif mode == "wait":
        await engine.wait_paused()
    if clear:
        engine.reset_prefix_cache()
    return ApiResponse.json({"status": "paused"})


async def resume(engine: Engine) -> ApiResponse:
    engine.resume()
    return ApiResponse.json({"status": "resumed"})


async def is_paused(engine: Engine) -> ApiResponse:
    return ApiResponse.json({"is_paused": engine.paused})


async def abort_requests(engine: Engine, request: ApiRequest) -> ApiResponse:
    data = await request.read()
    wanted = decode(data, AbortBody).request_ids if data.strip() else None
    ids = engine.live_ids
    if wanted is not None:
        known = frozenset(wanted)
        ids = [live for live in ids if not known.isdisjoint(_names(live))]
    return ApiResponse.json({"status": "aborted", "aborted": _abort(engine, ids)})


async def reset_prefix_cache(engine: Engine, request: ApiRequest) -> ApiResponse:
    query = dict(parse_qsl(request.query, keep_blank_values=True))
    engine.reset_prefix_cache(_flag(query, "reset_external", "false"))
    return ApiResponse.json({"success": True})


def _flag(query: dict[str, str], name: str, default: str) -> bool:
    value = query.get(name, default).lower()
    if value not in BOOLEANS:
        raise bad_request(f"`{name}` must be true or false, got {value[:40]!r}.", name)
    return BOOLEANS[value]


def _abort(engine: Engine, request_ids: list[str]) -> int:
    return sum(engine.finish(request_id) for request_id in request_ids)


def _names(engine_id: str) -> tuple[str, str]:
    """What a client may call a request: its answer's id, or the x-request-id that this was made from."""
    reply_id = engine_id.rpartition(".")[0]  # `ServedModel.engine_id` adds a serial number
    return reply_id, reply_id.partition("-")[2] or reply_id.partition("_")[2]
