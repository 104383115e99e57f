"""Streams that outlive their worker: the engine with a scripted worker that is killed, stopped, or breaks by itself."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from slipring.runtime.engine import Engine, HealthState
from slipring.runtime.fault_tolerance import FaultToleranceRequest
from slipring.runtime.request import EngineDeadError
from slipring.runtime.supervisor import Event, State
from slipring.shm.segment import Segment
from tests.runtime.test_engine import Collector, ask, healthy, num_descriptors, run, running, submit
from tests.simulated_device import expected_tokens
from tests.waits import settled


async def given(streams: list[Collector], count: int) -> None:
    """Until every stream has had so many pieces."""
    deadline = time.monotonic() + 60
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

            before = num_descriptors()
            # Where thousands of streams are served the collector of cycles may not run for a long time.
            gc.disable()
            try:
                for _ in range(3):
                    await cycle()
                await asyncio.sleep(0.1)
                assert len(os.listdir("/proc/self/fd")) == before
            finally:
                gc.enable()

    run(scenario())


def test_a_poison_request_is_found_and_fails_alone() -> None:
    async def scenario() -> None:
        async with running({"poison": 666, "step_s": 0.001}, num_gpu_blocks_override=256) as engine:
            prompts = [[i + 1, 2, 3] for i in range(7)]
            streams = [submit(engine, ask(prompt, 150, seed=i)) for i, prompt in enumerate(prompts)]
            await given(streams, 3)
            poison = submit(engine, ask([5, 666], 20))
            await poison.wait()
            last = poison.deltas[-1]
            assert last.finish_reason == "error" and "SIGKILL" in str(last.error) and "given up" in str(last.error)
            for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                await stream.wait()
                assert stream.tokens() == expected_tokens(prompt, i, engine.spec.vocab_size, 150)
            await healthy(engine)
            await settled(engine)

    run(scenario())


def test_the_guilty_one_among_many_that_never_got_anywhere() -> None:
    async def scenario() -> None:
        async with running({"poison": 666}) as engine:
            prompts = [[i, 2, 3] if i != 5 else [i, 666] for i in range(8)]
            streams = [submit(engine, ask(prompt, 8, seed=i)) for i, prompt in enumerate(prompts)]
            for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                await asyncio.wait_for(stream.done.wait(), 60)
                if i == 5:
                    assert stream.deltas[-1].finish_reason == "error"
                else:
                    assert stream.tokens() == expected_tokens(prompt, i, engine.spec.vocab_size, 8)
            await healthy(engine)
            await settled(engine)

    run(scenario())


def test_one_replica_of_two_dies_and_the_other_takes_what_comes() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.002}, data_parallel_size=2) as engine:
            first, second = (submit(engine, ask([9, i], 100, seed=i, data_parallel_rank=i)) for i in range(2))
            await given([first, second], 3)
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            while engine.replicas[0].state is State.HEALTHY:
                await asyncio.sleep(0.001)
            assert engine.health().state is HealthState.HEALTHY
            arrivals = [submit(engine, ask([1, i], 4)) for i in range(3)]
            await asyncio.gather(*(stream.wait() for stream in arrivals))
            assert engine.replicas[0].state is not State.HEALTHY, "nobody waited for it"
            for i, stream in enumerate((first, second)):
                await stream.wait()
                assert stream.tokens() == expected_tokens([9, i], i, engine.spec.vocab_size, 100)
            await settled(engine)

    run(scenario())


def test_what_a_dead_replica_held_goes_on_elsewhere() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.002}, data_parallel_size=2, auto_recovery=False) as engine:
            stream = submit(engine, ask([9, 1], 60, data_parallel_rank=0))
            await given([stream], 3)
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            while engine.replicas[0].state is not State.UNHEALTHY:
                await asyncio.sleep(0.001)
            with pytest.raises(EngineDeadError, match="rank 0"):
                submit(engine, ask([1], data_parallel_rank=0))
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            removal = {"removed_dp_ranks": [0], "dp_store_port": port, "dp_master_ip": "127.0.0.1"}
            result = await engine.fault_tolerance.apply(FaultToleranceRequest("scale_down", removal, "down"))
            assert result is not None and result.success, result
            await stream.wait()
            assert stream.tokens() == expected_tokens([9, 1], 1, engine.spec.vocab_size, 60)
            assert engine.replicas[0].state is State.REMOVED and engine.health().state is HealthState.HEALTHY
            await settled(engine)

    run(scenario())


def test_a_warm_spare_takes_over_and_is_replaced() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.01}, warm_spare=True) as engine:
            stream = submit(engine, ask([1, 2], 2000, request_id="long"))
            pids = [engine.worker_pids[0]]
            for _ in range(3):
                await given([stream], len(stream.deltas) + 5)
                spare = await spare_of(engine)
                os.kill(engine.worker_pids[0], signal.SIGKILL)
                while engine.worker_pids[0] == pids[-1]:
                    await asyncio.sleep(0.001)
                assert engine.worker_pids[0] == spare
                await healthy(engine)
                pids.append(spare)
            os.kill(await spare_of(engine), signal.SIGKILL)  # nobody misses it
            await given([stream], len(stream.deltas) + 5)
            engine.abort("long")
            assert stream.tokens() == expected_tokens([1, 2], 1, engine.spec.vocab_size, len(stream.tokens()))
            assert len(set(pids)) == 4
            await settled(engine)

    run(scenario())


async def spare_of(engine: Engine) -> int:
    deadline = time.monotonic() + 60
    while (spare := engine.replicas[0].epochs.spare) is None or spare.epoch.ready is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
    return spare.epoch.worker.pid


def test_no_room_for_the_next_epoch_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was in flight at the one death is not blamed again for epochs that could not be made."""

    async def scenario() -> None:
        async with running({"step_s": 0.002}) as engine:
            stream = submit(engine, ask([1, 2], 60))
            await given([stream], 3)
            left = [2]
            create = Segment.create

            def short(label: str, nbytes: int) -> Segment:
                if left[0]:
                    left[0] -= 1
                    raise OSError(28, "No space left on device")
                return create(label, nbytes)

            monkeypatch.setattr(Segment, "create", short)
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            await stream.wait()
            assert stream.deltas[-1].finish_reason == "length" and not left[0]
            assert stream.tokens() == expected_tokens([1, 2], 1, engine.spec.vocab_size, 60)
            await settled(engine)

    run(scenario())


def test_a_spare_that_breaks_as_it_is_needed_is_not_taken() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.01}, warm_spare=True, auto_recovery=False) as engine:
            stream = submit(engine, ask([1, 2], 40))
            pid = await spare_of(engine)
            await given([stream], 3)
            replica = engine.replicas[0]
            os.kill(replica.worker_pid, signal.SIGKILL)
            await replica.settled([State.UNHEALTHY])
            while psutil.pid_exists(replica.worker_pid):
                await asyncio.sleep(0.005)
            spare = replica.epochs.spare
            assert spare is not None
            # The change of epochs is on its way when the spare's death is seen, in the same turn of the loop.
            assert replica.command(Event.RETRY) is None
            os.kill(pid, signal.SIGKILL)
            spare._on_worker_death(-signal.SIGKILL)
            await stream.wait()
            assert engine.worker_pids[0] != pid
            assert stream.tokens() == expected_tokens([1, 2], 1, engine.spec.vocab_size, 40)

    run(scenario())


def test_dropping_a_spare_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(warm_spare=True) as engine:
            spare = await spare_of(engine)
            waited = _waits(monkeypatch)
            engine.replicas[0].command(Event.DRAIN)
            assert await engine.replicas[0].settled([State.DRAINED]) is State.DRAINED
            deadline = time.monotonic() + 10
            while psutil.pid_exists(spare):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)
            assert waited and all(waited), "the loop waited for a process that was not gone yet"

    run(scenario())


def _waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each wait for a process from now on, whether it was gone already."""
    found: list[bool] = []
    wait = subprocess.Popen.wait

    def checked(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        found.append(process.poll() is not None)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", checked)
    return found


def test_a_recovery_timeout_that_came_to_nothing_is_set_again() -> None:
    """It passes while the replica is out of service on purpose; a later fault has a timeout of its own."""

    async def scenario() -> None:
        settings = {"auto_recovery": False, "data_parallel_size": 2, "engine_recovery_timeout_sec": 0.3}
        async with running({"exit_at_restart": 3}, **settings) as engine:
            replica = engine.replicas[0]
            os.kill(replica.worker_pid, signal.SIGKILL)
            await asyncio.wait_for(replica.settled([State.UNHEALTHY]), 60)
            assert replica.command(Event.DRAIN) is None
            await asyncio.sleep(0.5)
            assert replica.state is State.DRAINED and replica.command(Event.RETRY) is None
            await asyncio.wait_for(replica.settled([State.UNHEALTHY]), 20)
            await asyncio.wait_for(replica.settled([State.DEAD]), 5)

    run(scenario())


@pytest.mark.parametrize("move_s", [0.15, 60.0], ids=["moved", "never moved"])
def test_a_drained_replica_leaves_no_slot_pinned(move_s: float) -> None:
    """What it has begun to store arrives, if its worker says so in time."""

    async def scenario() -> None:
        limits = {"data_parallel_size": 2, "kv_offloading_size": 0.05, "block_size": 16}
        async with running({"move_s": move_s}, **limits) as engine:
            await submit(engine, ask(list(range(64)), 4, data_parallel_rank=0)).wait()
            replica, tiers = engine.replicas[0], engine._tiers
            assert tiers is not None and tiers.stats().num_pinned == 4
            assert replica.command(Event.DRAIN) is None
            deadline = time.monotonic() + 8
            while tiers.stats().num_pinned:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert tiers.stats().num_occupied == (4 if move_s < 1 else 0)
            while psutil.pid_exists(replica.worker_pid):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert replica.command(Event.RETRY) is None
            await asyncio.wait_for(replica.settled([State.HEALTHY]), 60)
            await submit(engine, ask([5], 4, data_parallel_rank=0)).wait()

    run(scenario())


@pytest.mark.parametrize("warm_up_s", [0.0, 0.2])
def test_a_first_step_is_measured_by_the_warm_up(warm_up_s: float, tmp_path: Path) -> None:
    """Steps longer than the hang limit are no hang where the worker's own first one took long, too."""

    async def scenario() -> None:
        script = {"step_s": 0.6 if warm_up_s else 3.0, "warm_up_s": warm_up_s}
        async with running(script, hang_limit_s=0.3, flight_recorder_dir=str(tmp_path)) as engine:
            stream = submit(engine, ask([1, 2], 3))
            deadline = time.monotonic() + 60
            while stream.deltas == [] and not any(tmp_path.iterdir()):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            if warm_up_s:
                await stream.wait()
                assert stream.tokens() == expected_tokens([1, 2], 1, engine.spec.vocab_size, 3)
            assert any(tmp_path.iterdir()) == (not warm_up_s)

    run(scenario())
