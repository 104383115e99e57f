"""Streams that outlive their worker: the engine with a scripted worker that is killed, stopped, or breaks by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from slipring.runtime.engine import HealthState
from tests.runtime.test_engine import Collector, ask, healthy, num_descriptors, run, running, settled, submit
from tests.simulated_device import expected_tokens


async def given(streams: list[Collector], count: int) -> None:
    """Until every stream has had so many pieces."""
    deadline = time.monotonic() + 20
    while any(len(stream.deltas) < count for stream in streams):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_with_their_own_tokens(blow: signal.Signals, async_scheduling: bool) -> None:
    async def scenario() -> None:
        limits = {"hang_limit_s": 0.3, "async_scheduling": async_scheduling, "num_gpu_blocks_override": 256}
        async with running({"step_s": 0.002}, **limits) as engine:
            prompts = [[7] * 40 + [i] for i in range(12)]  # four of them wait
            streams = [submit(engine, ask(prompt, 120, seed=i)) for i, prompt in enumerate(prompts)]
            for _ in range(2):
                await given(streams[:8], 5)
                os.kill(engine.worker_pids[0], blow)
                while engine.health().state is HealthState.HEALTHY:
                    await asyncio.sleep(0.001)
                await healthy(engine)
            for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                await stream.wait()
                assert stream.tokens() == expected_tokens(prompt, i, engine.spec.vocab_size, 120)
                assert stream.text() == engine.tokenizer.decode(stream.tokens())
            await settled(engine)

    run(scenario())


def test_nothing_is_left_of_an_epoch() -> None:
    async def scenario() -> None:
        async with running() as engine:
            async def cycle() -> None:
                stream = submit(engine, ask([1], 200))
                await given([stream], 3)
                os.kill(engine.worker_pids[0], signal.SIGKILL)
                await stream.wait()
                await settled(engine)

            await cycle()
            before = num_descriptors()
            for _ in range(3):
                await cycle()
            assert num_descriptors() == before

    run(scenario())
