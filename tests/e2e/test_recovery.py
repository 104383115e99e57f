"""64 mixed streams whose worker is killed or stopped in the middle say what they say undisturbed.

Half are greedy and half seeded; there are penalties, grammars, stop strings, shared prefixes and aborts among them.
On a tiny model; the real one's turn is in `test_smollm2.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from slipring.runtime.engine import Engine, HealthState
from slipring.runtime.flight_recorder import Record, read_record
from tests.e2e.mixed_streams import ROOMY, Stream, answered, assert_equal, run, started, streams
from tests.e2e.tier_rig import save_tiny_model
from tests.waits import settled

HANG_LIMIT_S = 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(model: str) -> list[Stream]:
    return uvloop.run(answered(model, at_once=True, **ROOMY))[0]


async def disturbed(model: str, blows: list[tuple[int, signal.Signals]], **settings: Any) -> list[Stream]:
    """The worker is struck whenever so many tokens have come."""
    others = set(psutil.Process().children(recursive=True))  # servers that other tests share
    async with started(model, **ROOMY, **settings) as engine:
        found = streams()
        running = asyncio.ensure_future(run(engine, found, at_once=True))
        for num_tokens, blow in blows:
            while sum(len(stream.tokens) for stream in found) < num_tokens:
                await asyncio.sleep(0)
            assert not all(stream.done.is_set() for stream in found)
            await strike(engine, blow)
        await running
        await settled(engine)
        mine = set(psutil.Process().children(recursive=True)) - others
        assert [process.pid for process in mine] == engine.worker_pids and len(mine) == 1
        return found


async def strike(engine: Engine, blow: signal.Signals) -> None:
    """Hurt the worker, and see that it is noticed and replaced."""
    victim, before = engine.worker_pids[0], time.monotonic()
    os.kill(victim, blow)
    while engine.health().state is HealthState.HEALTHY:
        assert time.monotonic() - before < (30 if blow is signal.SIGSTOP else 2)
        await asyncio.sleep(0.001)
    while engine.health().state is not HealthState.HEALTHY:
        assert time.monotonic() - before < 60
        await asyncio.sleep(0.001)
    assert not psutil.pid_exists(victim)


def test_64_streams_outlive_killed_workers(model: str, undisturbed: list[Stream], tmp_path: Path) -> None:
    blows = [(60, signal.SIGKILL), (600, signal.SIGKILL)]
    assert_equal(uvloop.run(disturbed(model, blows, flight_recorder_dir=str(tmp_path))), undisturbed)
    assert [read_record(str(path)).event for path in tmp_path.iterdir()] == ["worker exit"] * len(blows)


def test_64_streams_outlive_a_stopped_worker(model: str, undisturbed: list[Stream], tmp_path: Path) -> None:
    settings = {"hang_limit_s": HANG_LIMIT_S, "flight_recorder_dir": str(tmp_path)}
    assert_equal(uvloop.run(disturbed(model, [(60, signal.SIGSTOP)], **settings)), undisturbed)
    (record,) = [read_record(str(path)) for path in tmp_path.iterdir()]
    assert record.event == "hang" and record.limit_s >= HANG_LIMIT_S
    assert record.silent_s < record.limit_s + 0.5, "what else runs here may delay the look at the clock"
    assert record.limit_s == HANG_LIMIT_S or _slowest(record) > 0.5 * HANG_LIMIT_S / 10, "a prediction far off"


def _slowest(record: Record) -> float:
    """Seconds that the longest of the last steps took."""
    return max((step.took_s for step in record.steps if step.took_s is not None), default=0.0)
