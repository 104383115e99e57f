from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slipring.runtime.deadlines import StepDeadline
from slipring.shm.layout import Phase


def _epoch() -> Any:
    state = SimpleNamespace(phase=Phase.RUNNING, heartbeat_ns=time.monotonic_ns())
    return SimpleNamespace(steps=SimpleNamespace(reader_state=lambda _: state))


async def _judged(deadline_of: Any, patience_s: float) -> float | None:
    """Seconds until somebody was judged."""
    over = asyncio.Event()
    began = time.monotonic()
    deadline = StepDeadline(0.1, _epoch(), lambda words, silent_s, limit_s: over.set())
    deadline_of(deadline)
    try:
        async with asyncio.timeout(patience_s):
            await over.wait()
        return time.monotonic() - began
    except TimeoutError:
        return None
    finally:
        deadline.cancel()


def _short_after_long(deadline: StepDeadline) -> None:
    now = time.monotonic()
    deadline.published(predicted_s=0.5, now=now)  # may take five seconds
    deadline.published(predicted_s=0.001, now=now)
    deadline.returned(now)


def _short_while_the_timer_of_a_long_one_runs(deadline: StepDeadline) -> None:
    now = time.monotonic()
    deadline.published(predicted_s=0.5, now=now)
    deadline.returned(now)
    deadline.published(predicted_s=0.001, now=now)


@pytest.mark.parametrize("steps", [_short_after_long, _short_while_the_timer_of_a_long_one_runs])
def test_a_step_with_little_time_does_not_wait_for_the_timer_of_one_with_much(steps: Any) -> None:
    seconds = asyncio.run(_judged(steps, 4.0))
    assert seconds is not None and 0.1 <= seconds < 4.0


def test_a_long_step_is_not_judged_by_the_limit_of_a_short_one() -> None:
    def steps(deadline: StepDeadline) -> None:
        now = time.monotonic()
        deadline.published(predicted_s=0.001, now=now)
        deadline.published(predicted_s=0.5, now=now)
        deadline.returned(now)

    assert asyncio.run(_judged(steps, 0.5)) is None


def test_nobody_is_judged_while_nothing_is_awaited() -> None:
    def steps(deadline: StepDeadline) -> None:
        now = time.monotonic()
        deadline.published(predicted_s=0.001, now=now)
        deadline.returned(now)

    assert asyncio.run(_judged(steps, 0.4)) is None
