"""Minutes of random traffic: arrivals, aborts, disconnects, slow readers. Memory stays flat, nothing is left over.

The worker is the scripted one (real process, real rings, a device that checks every block it reads), so that the
traffic is much denser than a model on a CPU allows. `pytest -m slow`; SOAK_SECONDS sets the length.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import aiohttp
import psutil
import pytest

from tests.serving import Server

SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))
CLIENTS = 48


class Traffic:
    """One client after another, each with its own whim."""

    def __init__(self, url: str, until: float, seed: int) -> None:
        self._url, self._until, self._random = url, until, random.Random(seed)
        self.answers = self.hang_ups = self.refused = 0

    async def run(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self._until:
            whim = self._random.choice(["read", "read", "plain", "leave", "crawl", "refuse"])
            await getattr(self, whim)(session)

    def _body(self, **more: object) -> dict[str, object]:
        shared = [7] * self._random.choice([0, 0, 32, 200])
        prompt = shared + [self._random.randrange(3, 40_000) for _ in range(self._random.randrange(1, 60))]
        limits = {"max_tokens": self._random.randrange(1, 120), "n": self._random.choice([1, 1, 1, 3])}
        return {"prompt": prompt, "ignore_eos": True, **limits, **more}

    async def read(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, json=self._body(stream=True)) as response:
            data = await response.read()
            assert response.status == 200 and data.endswith(b"data: [DONE]\n\n"), data[-200:]
            self.answers += 1

    async def plain(self, session: aiohttp.ClientSession) -> None:
        body = self._body()
        async with session.post(self._url, json=body) as response:
            answer = await response.json()
            tokens = answer["usage"]["completion_tokens"]
            assert tokens == body["max_tokens"] * body["n"], answer  # type: ignore[operator]
            self.answers += 1

    async def leave(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, json=self._body(stream=self._random.random() < 0.7)) as response:
            if self._random.random() < 0.5:
                await response.content.readany()
            response.close()
            self.hang_ups += 1

    async def crawl(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, json=self._body(stream=True)) as response:
            async for _ in response.content.iter_chunked(64):
                await asyncio.sleep(0.002)
            self.answers += 1

    async def refuse(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, json=self._body(temperature=-1)) as response:
            assert response.status == 400
            self.refused += 1


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_nothing_grows_and_nothing_is_left() -> None:
    flags = ["--worker-module", "tests.scripted_worker", "--debug-integrity", "--num-gpu-blocks-override", "64"]
    with Server(*flags, "--max-num-seqs", "16", "--max-num-batched-tokens", "64") as server:
        engine = psutil.Process(server.process.pid)
        rss = asyncio.run(_soak(server, engine))
        deadline = time.monotonic() + 10
        while server.gauge("slipring:num_free_blocks") != 64 or server.gauge("vllm:num_requests_running"):
            assert time.monotonic() < deadline, "blocks or rows are still held"
            time.sleep(0.05)
        assert server.gauge("vllm:num_requests_waiting") == 0
        assert server.gauge("vllm:num_preemptions_total") > 0
        assert engine.num_fds() < 64, "descriptors are left open"
    warm, last = rss[len(rss) // 3], rss[-1]
    print(f"resident MB over time: {[round(value / 1e6) for value in rss]}")
    assert last < warm * 1.05 + 4e6, f"memory grew from {warm / 1e6:.0f} to {last / 1e6:.0f} MB"


async def _soak(server: Server, engine: psutil.Process) -> list[int]:
    until = time.monotonic() + SECONDS
    traffic = [Traffic(server.url + "/v1/completions", until, seed) for seed in range(CLIENTS)]
    rss: list[int] = []

    async def watch() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(SECONDS / 30)
            rss.append(engine.memory_info().rss)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(watch(), *[client.run(session) for client in traffic])
    assert sum(client.answers for client in traffic) > SECONDS
    assert sum(client.hang_ups for client in traffic) and sum(client.refused for client in traffic)
    return rss
