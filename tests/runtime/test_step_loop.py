"""A step loop that breaks in the middle of a returned step."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from slipring.runtime.step_loop import StepLoop
from tests.runtime.test_engine import ask, run, running, submit
from tests.runtime.test_recovery import given
from tests.simulated_device import expected_tokens


def break_at(loop: StepLoop, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as two steps lie in the ring, the first of them is taken as far as this place."""
    take, scheduler = loop._take_output, loop.scheduler
    assert scheduler is not None

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("broken on purpose")

    def take_output(slot: int) -> None:
        if scheduler.num_in_flight > 1:
            deadline = time.monotonic() + 10
            while loop.epoch.outputs.try_read(1) is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            monkeypatch.setattr(scheduler if place == "settle" else loop, place, broken)
        take(slot)

    monkeypatch.setattr(loop, "_take_output", take_output)


@pytest.mark.parametrize("place", ["_pump", "settle"])
def test_what_lies_in_the_ring_is_delivered_wherever_the_loop_breaks(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.01}, auto_recovery=False) as engine:
            stream = submit(engine, ask([1, 2], 60))
            await given([stream], 3)
            loop = engine.replicas[0].step_loop
            break_at(loop, place, monkeypatch)
            while loop.fault is None:
                num_given = len(stream.tokens())
                await asyncio.sleep(0)
            async with asyncio.timeout(20):
                while not loop.epoch.closed:
                    await asyncio.sleep(0.001)
            tokens = stream.tokens()
            assert len(tokens) >= num_given + 2
            assert tokens == expected_tokens([1, 2], 1, engine.spec.vocab_size, 60)[: len(tokens)]

    run(scenario())
