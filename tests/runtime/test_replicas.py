"""Several replicas of one engine: who takes what."""

from __future__ import annotations

from tests.runtime.test_engine import ask, run, running, submit
from tests.waits import settled


def test_idle_replicas_take_turns() -> None:
    async def scenario() -> None:
        async with running(data_parallel_size=2) as engine:
            for i in range(6):
                await submit(engine, ask([i + 1, 2 * i + 5], 4)).wait()
                await settled(engine)
            assert [each.generation_tokens for each in engine.stats().by_rank] == [12, 12]

    run(scenario())
