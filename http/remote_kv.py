"""Two instances share a request: one computes the prompt, the other goes on from its KV pages (`p2p` tiers).

A proxy (those of vLLM and llm-d speak so) sends the prompt to the first with `max_tokens` 1 and

    "kv_transfer_params": {"do_remote_decode": true}

takes `kv_transfer_params` out of the answer, and puts it into the request that it sends to the second:

    "kv_transfer_params": {"do_remote_prefill": true, "remote_host": ..., "remote_port": ..., ...}

The first answers when its pages can be had; the second asks that peer first. Pages are found by their content, so
block and engine ids mean nothing here, and what cannot be fetched is computed. Only configured peers are asked: a
client must not make the server connect to wherever it likes. vLLM's `remote_decoder`, `remote_prefiller` and
`remote_kv_source` say the same in other words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipring.http.bodies import KvTransferParams, SamplingBody
from slipring.http.errors import bad_request
from slipring.http.logprobs import TokenIds
from slipring.runtime.engine import Engine
from slipring.runtime.tiers.address import PEER_PREFIX, peer_name

_PATIENCE_S = 2.0
"""For pages to get from the device into the CPU tier. What is not there by then, the other one computes."""


def kv_source(params: KvTransferParams) -> str | None:
    """The tier to be asked first, by its name. Raises ApiError when it is not said whose."""
    if params.do_remote_prefill:
        where, host, port = "kv_transfer_params", params.remote_host, params.remote_port
    elif (remote := params.remote_prefiller or params.remote_kv_source) is not None:
        name = "remote_prefiller" if params.remote_prefiller else "remote_kv_source"
        where, host, port = f"kv_transfer_params.{name}", remote.remote_host, remote.remote_port
    else:
        return None
    if host is None or port is None:
        missing = "remote_host" if host is None else "remote_port"
        raise bad_request(f"`{where}.{missing}` is missing: whose pages shall be taken?", f"{where}.{missing}")
    return peer_name(host, port)


def hands_over(body: SamplingBody) -> bool:
    """Whether another instance will go on."""
    params = body.kv_transfer_params
    return params is not None and bool(params.do_remote_decode or params.remote_decoder)


def check(engine: Engine, body: SamplingBody) -> None:
    """Raises ApiError when this instance cannot do what is asked of it."""
    params = body.kv_transfer_params
    if params is None:
        return
    if hands_over(body):
        param = "kv_transfer_params.do_remote_decode"
        if engine.kv_served_at is None:
            message = "this server serves no KV pages: it needs a KV tier of type p2p with a `port`"
            raise bad_request(f"`{param}`: {message}.", param)
        if params.do_remote_prefill:
            raise bad_request(f"`{param}` and `do_remote_prefill` exclude each other.", param)
        if body.stream:
            raise bad_request(f"`{param}` needs `stream: false`: the answer says where the pages are.", param)
    source = kv_source(params)
    if source is not None and engine.kv_peer(source) is None:
        known = ", ".join(name.removeprefix(PEER_PREFIX) for name in engine.kv_peers) or "none"
        message = f"{source.removeprefix(PEER_PREFIX)} is not among the peers of this server ({known})"
        raise bad_request(f"`kv_transfer_params`: {message}.", "kv_transfer_params.remote_host")


async def handover(engine: Engine, body: SamplingBody, prompts: Sequence[TokenIds], reply_id: str) -> dict[str, Any]:
    """What the other instance's request shall carry; waits until the pages can be had."""
    assert engine.kv_served_at is not None
    for prompt in prompts:
        await engine.kv_stored(prompt, body.cache_salt, _PATIENCE_S)
    host, port = engine.kv_served_at
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": peer_name(host, port).removeprefix(PEER_PREFIX),
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": reply_id,
        "tp_size": 1,
    }
