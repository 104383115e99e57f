"""The tiers of one engine as they are opened from its configuration."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from slipring.http.bodies import KvTransferParams, RemoteKv
from slipring.http.remote_kv import kv_source
from slipring.runtime.tiers.config import parse
from slipring.runtime.tiers.kv_tiers import KvTiers
from slipring.scheduler.offload.key import offload_key
from slipring.shm.pages import PageShape
from slipring.shm.spec import ModelSpec
from tests.e2e.tier_rig import free_port

SHAPE = PageShape(4, 16, 2, 64)


def opened(spec: ModelSpec, **tier: object) -> KvTiers:
    extra = {"cpu_bytes_to_use": 4 * SHAPE.nbytes, "secondary_tiers": [{"type": "p2p"} | tier]}
    config = parse(json.dumps({"kv_connector_extra_config": extra}))
    return KvTiers(config, spec, SHAPE, "float32", 512, asyncio.get_running_loop())


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine"))],
)
def test_the_consumer_knows_the_producer_by_what_the_producer_hands_over(spec: ModelSpec, host: str) -> None:
    async def main() -> None:
        port = free_port()
        producer, consumer = opened(spec, host=host, port=port), opened(spec, peers=[f"{host}:{port}"])
        try:
            await producer.start()
            assert producer.serves_at is not None
            handed, asked = producer.serves_at, [(host, port), producer.serves_at]
            for where in asked:
                remote = RemoteKv(remote_host=where[0], remote_port=where[1])
                for params in (
                    KvTransferParams(do_remote_prefill=True, remote_host=where[0], remote_port=where[1]),
                    KvTransferParams(remote_prefiller=remote),
                ):
                    source = kv_source(params)
                    assert source is not None and consumer.peer(source) == consumer.peers[0], where
            socket.create_connection(handed, 5).close()
            found = asyncio.get_running_loop().create_future()
            consumer.tiers.promote([offload_key(bytes(32))], 1.0, lambda: found.set_result(None))
            await asyncio.wait_for(found, 5)
            stats = consumer.stats().stores[consumer.peers[0]]
            assert (stats.failed, stats.late) == (0, 0), "it was asked, and has answered"
        finally:
            producer.close()
            consumer.close()

    asyncio.run(main())
