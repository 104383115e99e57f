"""What a replica does when somebody intervenes between a fault and the next worker."""

from __future__ import annotations

import asyncio

import pytest

from slipring.runtime.epoch import Epoch
from slipring.runtime.replica import Replica
from slipring.runtime.supervisor import Event, State
from tests.runtime.test_engine import ask, run, running, submit
from tests.runtime.test_recovery import given
from tests.simulated_device import expected_tokens
from tests.waits import settled


async def broken_with_an_output_unread(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop has failed, its worker is not reaped yet, and a step of it lies in the ring."""
    loop = replica.step_loop

    def broken(slot: int) -> None:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr(loop, "_take_output", broken)
    await replica.settled([State.UNHEALTHY])
    assert loop.epoch.outputs_are_there() and not loop.epoch.closed


@pytest.mark.parametrize("event", [Event.DRAIN, Event.SCALE_DOWN])
def test_a_request_that_was_handed_over_is_computed_once(event: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the old worker has published of it counts no more: neither its tokens nor its end."""

    async def scenario() -> None:
        async with running({"step_s": 0.01}, data_parallel_size=2, auto_recovery=False) as engine:
            lengths = [4, 30]
            streams = [submit(engine, ask([9, n], n, seed=n, data_parallel_rank=0)) for n in lengths]
            await given(streams, 3)
            first, second = engine.replicas
            await broken_with_an_output_unread(first, monkeypatch)
            assert first.command(event) is None
            for n, stream in zip(lengths, streams, strict=True):
                await stream.wait()
                assert stream.tokens() == expected_tokens([9, n], n, engine.spec.vocab_size, n)
                assert stream.deltas[-1].finish_reason == "length"
            assert second.state is State.HEALTHY and second.fault is None
            await settled(engine)

    run(scenario())


def test_a_replica_that_is_given_up_before_its_next_worker_begins_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(auto_recovery=False) as engine:
            stream = submit(engine, ask([9], 30))
            (replica,) = engine.replicas
            await broken_with_an_output_unread(replica, monkeypatch)
            last = replica.step_loop
            assert replica.command(Event.RETRY) is None and replica.command(Event.RECOVERY_TIMEOUT) is None
            assert replica.state is State.DEAD
            await stream.wait()
            assert stream.deltas[-1].finish_reason == "error"
            await asyncio.sleep(0)
            async with replica.epochs.changing:
                pass
            assert replica.step_loop is last

    run(scenario())


def test_whoever_ends_the_workers_of_two_replicas_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica dies at its first fault; the second one's workers begin again, and two of them die."""
    gone: list[Epoch] = []
    reaped = Epoch.reaped

    async def reaped_unless_first(epoch: Epoch, timeout_s: float) -> bool:
        gone.append(epoch)
        return epoch is not gone[0] and await reaped(epoch, timeout_s)

    async def scenario() -> None:
        async with running({"poison": 666, "step_s": 0.002}, data_parallel_size=2) as engine:
            streams = [submit(engine, ask([i + 1, 2, 3], 60, seed=i)) for i in range(4)]
            await given(streams, 3)
            monkeypatch.setattr(Epoch, "reaped", reaped_unless_first)
            poison = submit(engine, ask([5, 666], 20))
            await poison.wait()
            assert "workers of two replicas died while computing this request" in str(poison.deltas[-1].error)
            for i, stream in enumerate(streams):
                await stream.wait()
                assert stream.tokens() == expected_tokens([i + 1, 2, 3], i, engine.spec.vocab_size, 60)
            assert sorted(replica.state is State.DEAD for replica in engine.replicas) == [False, True]
            assert sum(replica.metrics.faults.num_guilty for replica in engine.replicas) == 1
            await settled(engine)

    run(scenario())


def test_what_breaks_workers_does_not_go_from_replica_to_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are never reaped, so nobody looks for a guilty request: each replica dies at its first fault."""

    async def unreapable(epoch: Epoch, timeout_s: float) -> bool:
        return False

    async def scenario() -> None:
        async with running({"poison": 666, "step_s": 0.002}, data_parallel_size=3) as engine:
            streams = [submit(engine, ask([i + 1, 2, 3], 60, seed=i)) for i in range(6)]
            await given(streams, 3)
            with monkeypatch.context() as patch:
                patch.setattr(Epoch, "reaped", unreapable)
                poison = submit(engine, ask([5, 666], 20))
                await poison.wait()
                assert poison.deltas[-1].finish_reason == "error"
                assert "two replicas" in str(poison.deltas[-1].error)
            for i, stream in enumerate(streams):
                await stream.wait()
                assert stream.tokens() == expected_tokens([i + 1, 2, 3], i, engine.spec.vocab_size, 60)
            assert [replica.state for replica in engine.replicas].count(State.DEAD) == 2
            await settled(engine)

    run(scenario())
