"""64 streams of the real model whose worker is killed or stopped in the middle: every token as in an undisturbed run.

Half are greedy and half seeded; some have penalties, some share a prefix, some stop at a string or a token, some are
aborted on the way. "Equal" is `test_equal_tokens.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest
import uvloop

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine, HealthState
from tests.e2e.test_equal_tokens import Stream, assert_equal, run_all, streams

LIMITS = {"dtype": "float32", "max_num_seqs": 64, "debug_integrity": True}


async def undisturbed() -> list[Stream]:
    engine = Engine(EngineConfig(model="smollm2", **LIMITS))
    await engine.start()
    try:
        found = streams(engine)
        await run_all(engine, found, at_once=True)
        return found
    finally:
        await engine.stop()


async def disturbed(blow: signal.Signals, times: int) -> list[Stream]:
    limits = {"max_num_batched_tokens": 64, "hang_limit_s": 8.0} if blow is signal.SIGSTOP else {}
    engine = Engine(EngineConfig(model="smollm2", **LIMITS, **limits))
    await engine.start()
    try:
        found = streams(engine)
        running = asyncio.ensure_future(run_all(engine, found, at_once=True))
        for number in range(times):
            while sum(len(stream.tokens) for stream in found) < 60 + 80 * number:
                await asyncio.sleep(0.005)
            await strike(engine, blow)
        await running
        await all_given_back(engine)
        assert not psutil.Process().children(recursive=True) or len(engine.worker_pids) == 1
        return found
    finally:
        await engine.stop()


async def strike(engine: Engine, blow: signal.Signals) -> None:
    """Hurt the worker, and see that it is noticed and replaced."""
    victim, before = engine.worker_pids[0], time.monotonic()
    os.kill(victim, blow)
    while engine.health().state is HealthState.HEALTHY:
        assert time.monotonic() - before < (30 if blow is signal.SIGSTOP else 2)
        await asyncio.sleep(0.001)
    while engine.health().state is not HealthState.HEALTHY:
        assert time.monotonic() - before < 60
        await asyncio.sleep(0.01)
    assert not psutil.pid_exists(victim)


async def all_given_back(engine: Engine) -> None:
    deadline = time.monotonic() + 5
    while (stats := engine.stats()).num_free_blocks != stats.num_blocks or stats.num_running or stats.num_waiting:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def reference() -> list[Stream]:
    return uvloop.run(undisturbed())


@pytest.mark.parametrize(("blow", "times"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 1)], ids=["killed", "stopped"])
def test_64_streams_outlive_their_worker(reference: list[Stream], blow: signal.Signals, times: int) -> None:
    assert_equal(uvloop.run(disturbed(blow, times)), reference)
