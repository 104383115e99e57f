"""64 streams of the real model whose worker is killed or stopped in the middle: every token as in an undisturbed run.

Half are greedy and half seeded; some have penalties, some share a prefix, some stop at a string or a token, some are
aborted on the way. "Equal" is `test_equal_tokens.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine, HealthState
from slipring.runtime.flight_recorder import Record, read_record
from slipring.runtime.grammar import GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams
from tests.e2e.test_equal_tokens import Stream, assert_equal, run_all, streams

HANG_LIMIT_S = 1.0
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


async def disturbed(blow: signal.Signals, times: int, records: Path) -> list[Stream]:
    # For the hang limit of a second steps must be short: 16 tokens at a time.
    short = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "hang_limit_s": HANG_LIMIT_S, "cpu_threads": 1}
    limits = LIMITS | {"flight_recorder_dir": str(records)} | (short if blow is signal.SIGSTOP else {})
    engine = Engine(EngineConfig(model="smollm2", **limits))
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
    deadline = time.monotonic() + 30
    while (stats := engine.stats()).num_free_blocks != stats.num_blocks or stats.num_running or stats.num_waiting:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def reference() -> list[Stream]:
    return uvloop.run(undisturbed())


@pytest.mark.parametrize(("blow", "times"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 1)], ids=["killed", "stopped"])
def test_64_streams_outlive_their_worker(
    reference: list[Stream], blow: signal.Signals, times: int, tmp_path: Path
) -> None:
    assert_equal(uvloop.run(disturbed(blow, times, tmp_path)), reference)
    if blow is signal.SIGSTOP:
        for record in map(read_record, map(str, tmp_path.iterdir())):
            assert record.event == "hang" and record.limit_s >= HANG_LIMIT_S
            assert record.silent_s < record.limit_s + 0.5, "what else runs here may delay the look at the clock"
            assert record.limit_s == HANG_LIMIT_S or _slowest(record) > 0.5 * HANG_LIMIT_S / 10, "a prediction far off"


def _slowest(record: Record) -> float:
    """Seconds that the longest of the last steps took."""
    return max((step.took_s for step in record.steps if step.took_s is not None), default=0.0)


def test_constraints_and_stop_strings_go_on_where_they_were() -> None:
    uvloop.run(_constrained())


async def _constrained() -> None:
    engine = Engine(EngineConfig(model="smollm2", **LIMITS))
    await engine.start()
    try:
        requests = await _constrained_requests(engine)
        undisturbed_texts = await _texts(engine, requests, "a", None)
        killed_texts = await _texts(engine, requests, "b", signal.SIGKILL)
        assert killed_texts == undisturbed_texts
        assert all(re.fullmatch(PATTERN, text) for text in killed_texts[:2])
    finally:
        await engine.stop()


PATTERN = "([a-z]{3,7} ){12}end"


async def _constrained_requests(engine: Engine) -> list[GenerationRequest]:
    grammar = await engine.compile_grammar(GrammarSpec("regex", PATTERN), "regex")
    params = SamplingParams(max_tokens=80, temperature=0.0, stop_token_ids=engine.spec.eos_token_ids)
    seeded = msgspec.structs.replace(params, temperature=0.7, seed=5, repetition_penalty=1.1)
    prompt = engine.tokenizer.encode("Some short words:")
    common = {"request_id": "", "prompt_token_ids": prompt}
    return [
        GenerationRequest(**common, params=params, grammar=grammar),
        GenerationRequest(**common, params=seeded, grammar=grammar),
        GenerationRequest(**common, params=params, stop=(" the", ".\n")),
        GenerationRequest(**common, params=seeded, stop=(" and",)),
    ]


async def _texts(
    engine: Engine, requests: list[GenerationRequest], serial: str, blow: signal.Signals | None
) -> list[str]:
    pieces: list[list[Delta]] = [[] for _ in requests]
    for i, request in enumerate(requests):
        engine.submit(msgspec.structs.replace(request, request_id=f"{serial}{i}"), pieces[i].append)
    while len(pieces[0]) < 6:
        await asyncio.sleep(0.002)
    if blow is not None:
        await strike(engine, blow)
    while not all(deltas and deltas[-1].finish_reason for deltas in pieces):
        await asyncio.sleep(0.01)
    assert all(deltas[-1].finish_reason in ("stop", "length") for deltas in pieces), pieces
    return ["".join(delta.text for delta in deltas) for deltas in pieces]
