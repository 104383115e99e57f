"""Random kills, stops, aborts, disconnects and overload: no stream is lost that its client did not give up.

Two replicas of the scripted worker, whose device checks every block it reads and whose every token is known: each
answer is compared with the one that an undisturbed worker gives. The long run is `pytest -m slow`; CHAOS_SECONDS sets
its length.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter

import aiohttp
import psutil
import pytest

from slipring.runtime.model import open_model
from tests import dev_shm
from tests.serving import Server
from tests.simulated_device import expected_tokens

MODEL = open_model("smollm2")
VOCABULARY = MODEL.spec.vocab_size
FLAGS = (
    "--worker-module", "tests.scripted_worker", "--data-parallel-size", "2", "--debug-integrity", "--hang-limit", "1.5",
    "--num-gpu-blocks-override", "96", "--max-num-seqs", "16", "--max-num-batched-tokens", "64",
    "--max-queued-requests", "24",
)  # fmt: skip
CLIENTS = 40
PATIENCE_S = 100
"""A worker that is stopped while it starts is called hung after a minute."""


class Client:
    def __init__(self, server: Server, until: float, seed: int, seen: Counter[str]) -> None:
        self._server = server
        self._url, self._until = server.url + "/v1/completions", until
        self._random, self._seen = random.Random(seed), seen

    async def run(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self._until:
            whim = self._random.choice(["stream", "stream", "plain", "leave"])
            asked = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._ask(session, whim)
            except TimeoutError:
                states = await asyncio.to_thread(self._server.get, "/metrics")
                told = [line for line in states.splitlines() if "replicas{" in line or "num_requests" in line]
                raise AssertionError(f"a {whim} request had no answer for {PATIENCE_S} s: {told}") from None
            self._seen["slowest"] = max(self._seen["slowest"], round(time.monotonic() - asked))

    async def _ask(self, session: aiohttp.ClientSession, whim: str) -> None:
        prompt = [7] * self._random.choice([0, 40]) + [self._random.randrange(3, 40_000) for _ in range(5)]
        seed, count = self._random.randrange(1 << 31), self._random.randrange(1, 60)
        body = {
            "prompt": prompt, "seed": seed, "max_tokens": count, "ignore_eos": True, "stream": whim != "plain",
        }  # fmt: skip
        async with session.post(self._url, json=body) as response:
            if response.status == 429:
                self._seen["refused"] += 1
                await asyncio.sleep(0.05)
                return
            assert response.status == 200, await response.text()
            if whim == "leave":
                await response.content.readany()
                response.close()
                self._seen["left"] += 1
                return
            data = await response.read()
        text = _text(data, whim)
        tokens = expected_tokens(prompt, seed, VOCABULARY, count)
        assert text == MODEL.tokenizer().decode(tokens), f"{whim}: {data[-300:]!r}"
        self._seen["answered"] += 1


def _text(data: bytes, whim: str) -> str:
    if whim == "plain":
        return json.loads(data)["choices"][0]["text"]
    assert data.endswith(b"data: [DONE]\n\n"), data[-300:]
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


async def hurt(server: Server, until: float, every_s: tuple[float, float], seen: Counter[str]) -> None:
    rng = random.Random(5)
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(*every_s))
        while await asyncio.to_thread(server.health) != 200 and time.monotonic() < until:
            # On a machine so busy that workers are killed faster than they start nobody could be served.
            await asyncio.sleep(0.1)
        victims = [pid for pid in server.worker_pids if pid > 1]
        if victims:
            blow = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            try:
                os.kill(rng.choice(victims), blow)
            except ProcessLookupError:
                continue
            seen[blow.name] += 1


async def chaos(server: Server, seconds: float, every_s: tuple[float, float]) -> Counter[str]:
    until = time.monotonic() + seconds
    seen: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [Client(server, until, seed, seen).run(session) for seed in range(CLIENTS)]
        await asyncio.gather(hurt(server, until, every_s, seen), *clients)
    return seen


def check(seconds: float, every_s: tuple[float, float]) -> None:
    before = dev_shm.names()
    with Server(*FLAGS, environment={"SCRIPT": '{"step_s": 0.004}'}) as server:
        engine = psutil.Process(server.process.pid)
        seen = asyncio.run(chaos(server, seconds, every_s))
        deadline = time.monotonic() + 60
        # All blocks of both replicas are free again, and both are there.
        while server.gauge("slipring:num_free_blocks") != 2 * 96 or server.gauge("vllm:num_requests_running"):
            assert time.monotonic() < deadline, "rows or blocks are still held, or a replica did not come back"
            time.sleep(0.1)
        assert server.gauge("vllm:num_requests_waiting") == 0
        assert server.gauge("slipring:guilty_requests_total") == 0, "nobody was blamed for what came from outside"
        assert len(server.worker_pids) == 2 and engine.num_fds() < 100, engine.num_fds()
        assert server.health() == 200
    print(dict(seen))
    assert seen["answered"] > seconds and seen["SIGKILL"] and seen["SIGSTOP"]
    dev_shm.assert_nothing_new(before)


def test_half_a_minute_of_chaos() -> None:
    check(30.0, (0.5, 1.5))


@pytest.mark.slow
@pytest.mark.timeout(float(os.environ.get("CHAOS_SECONDS", "300")) + 180)
def test_minutes_of_chaos() -> None:
    check(float(os.environ.get("CHAOS_SECONDS", "300")), (1.5, 8.0))
