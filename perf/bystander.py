"""What a replica's death costs the streams of the other one.

Two replicas, the worker of each pinned to one CPU (`--cpu-affinity 0|1`), so that what a new worker does to start
(importing torch, mapping weights) cannot take the other's CPU; the event loop runs wherever there is room. Both serve
the same streams. Gaps between tokens of the bystander's streams are compared: those that end in the seconds before a
kill of the other's worker, and those that end between the kill and the other's recovery.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.runtime.supervisor import State
from slipring.shm.params import SamplingParams

NUM_STREAMS = 8
"""Of each replica."""
BEFORE_S = 4.0
_TICK_S = 0.001


@dataclass
class Stream:
    arrivals: list[float] = field(default_factory=list)
    """Times of the pieces that held a token."""
    num_tokens: int = 0
    finish: str | None = None

    def sink(self, delta: Delta) -> None:
        if delta.token_ids:
            self.arrivals.append(time.monotonic())
            self.num_tokens += len(delta.token_ids)
        self.finish = delta.finish_reason or self.finish

    def gaps(self, begin: float, end: float) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False) if begin <= b < end]


@dataclass
class Found:
    before_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    stall_before_s: float = 0.0
    """The longest time for which the event loop did not turn."""
    stall_during_s: float = 0.0
    newcomer_s: list[float] = field(default_factory=list)
    """First token of a request that came right after the kill."""
    recovery_s: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        return float(np.percentile(self.during_s, 99) / np.percentile(self.before_s, 99))


async def measure_bystander(num_kills: int) -> Found | None:
    """None where there is only one CPU."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        return None
    engine = Engine(
        EngineConfig(
            model="smollm2", dtype="float32", data_parallel_size=2, cpu_affinity=f"{cpus[0]}|{cpus[1]}",
            max_num_seqs=NUM_STREAMS + 1, kv_cache_memory_bytes=512 << 20, enable_prefix_caching=False,
        )
    )  # fmt: skip
    await engine.start()
    engine.collect_when_idle()
    found = Found()
    try:
        for number in range(num_kills):
            await _one_kill(engine, found, number)
        return found
    finally:
        await engine.stop()


async def _one_kill(engine: Engine, found: Found, number: int) -> None:
    streams = [[_submit(engine, f"{number}-{rank}-{i}", rank, 4000) for i in range(NUM_STREAMS)] for rank in range(2)]
    while any(stream.num_tokens < 5 for both in streams for stream in both):
        await asyncio.sleep(0.01)
    begin = time.monotonic()
    found.stall_before_s = max(found.stall_before_s, await _turning(asyncio.sleep(BEFORE_S)))
    killed = time.monotonic()
    os.kill(engine.worker_pids[0], signal.SIGKILL)
    found.stall_during_s = max(found.stall_during_s, await _turning(_recovered(engine, found, number)))
    recovered = time.monotonic()
    for stream in streams[1]:
        assert stream.finish is None, "no request of the other replica is touched"
        found.before_s += stream.gaps(begin, killed)
        found.during_s += stream.gaps(killed, recovered)
    found.recovery_s.append(recovered - killed)
    before = [stream.num_tokens for stream in streams[0]]
    while any(stream.num_tokens <= count for stream, count in zip(streams[0], before, strict=True)):
        await asyncio.sleep(0.01)
    for request_id in engine.live_ids:
        engine.abort(request_id)
    while engine.stats().num_free_blocks != engine.stats().num_blocks:
        await asyncio.sleep(0.01)


async def _recovered(engine: Engine, found: Found, number: int) -> None:
    """A request that comes as soon as the death is seen has its first token long before there is a new worker."""
    replica = engine.replicas[0]
    while replica.state is State.HEALTHY:
        await asyncio.sleep(0.0005)
    came = time.monotonic()
    newcomer = _submit(engine, f"{number}-new", None, 4)
    while newcomer.finish is None:
        await asyncio.sleep(0.001)
    assert replica.state is not State.HEALTHY, "it waited for nobody"
    found.newcomer_s.append(newcomer.arrivals[0] - came)
    while replica.state is not State.HEALTHY:
        await asyncio.sleep(0.001)


def _submit(engine: Engine, request_id: str, rank: int | None, max_tokens: int) -> Stream:
    stream = Stream()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt = [1, 500, 600, 700]
    engine.submit(
        GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params, data_parallel_rank=rank),
        stream.sink,
    )
    return stream


async def _turning(work: Coroutine[Any, Any, None]) -> float:
    """The longest time for which the loop did not turn while this was done."""
    task = asyncio.ensure_future(work)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(_TICK_S)
        now = time.monotonic()
        longest, last = max(longest, now - last - _TICK_S), now
    task.result()
    return longest
