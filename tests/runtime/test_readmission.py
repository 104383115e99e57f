"""Streams of a replica that recovers go on with another one that has room, and with nobody where that is not safe."""

from __future__ import annotations

import asyncio
import os
import signal

from slipring.runtime.engine import Engine
from slipring.runtime.fault_tolerance import FaultToleranceRequest
from slipring.runtime.supervisor import State
from tests.runtime.test_engine import Collector, ask, run, running, submit
from tests.runtime.test_recovery import given
from tests.simulated_device import expected_tokens
from tests.waits import settled


async def killed(engine: Engine, rank: int) -> None:
    os.kill(engine.worker_pids[rank], signal.SIGKILL)
    while engine.replicas[rank].state is State.HEALTHY:
        await asyncio.sleep(0.001)


def ranks_of(engine: Engine, names: list[str]) -> list[int]:
    """Which replica computes each of these requests."""
    found = [engine._live[name][0].replica for name in names]
    return [replica.rank for replica in found if replica is not None]


def test_who_is_not_pinned_does_not_wait_for_the_recovery() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.002}, data_parallel_size=2, auto_recovery=False) as engine:
            prompts = {f"free{i}": [9, i] for i in range(6)} | {"pinned": [7, 7]}
            streams = {
                name: submit(engine, ask(prompt, 60, request_id=name, data_parallel_rank=None if i < 6 else 0))
                for i, (name, prompt) in enumerate(prompts.items())
            }
            await given(list(streams.values()), 3)
            assert set(ranks_of(engine, list(streams))) == {0, 1}
            await killed(engine, 0)
            free = [name for name in streams if name != "pinned"]
            await asyncio.gather(*(streams[name].wait() for name in free))
            assert engine.replicas[0].state is State.UNHEALTHY, "nobody has mended it yet"
            assert not streams["pinned"].done.is_set() and ranks_of(engine, ["pinned"]) == [0]
            counted = [stats.generation_tokens for stats in engine.stats().by_rank]
            assert sum(counted) == 6 * 60 + len(streams["pinned"].tokens()) and counted[1] > counted[0] > 0
            retry = FaultToleranceRequest("retry", {}, "again")
            result = await engine.fault_tolerance.apply(retry)
            assert result is not None and result.success
            await streams["pinned"].wait()
            for name, prompt in prompts.items():
                assert streams[name].tokens() == expected_tokens(prompt, 1, engine.spec.vocab_size, 60)
            await settled(engine)

    run(scenario())


def test_no_more_go_than_there_is_room_for() -> None:
    async def scenario() -> None:
        settings = {"data_parallel_size": 2, "auto_recovery": False, "max_num_seqs": 3}
        async with running({"step_s": 0.002}, **settings) as engine:
            names = [f"r{i}" for i in range(5)]
            first = [submit(engine, ask([i, 3], 90, request_id=names[i], data_parallel_rank=1)) for i in range(2)]
            rest = [submit(engine, ask([i, 3], 30, request_id=names[i], session="s")) for i in range(2, 5)]
            await given([*first, *rest], 3)
            on_first = [name for name, rank in zip(names, ranks_of(engine, names), strict=True) if rank == 0]
            assert len(on_first) >= 2
            await killed(engine, 0)
            async with asyncio.timeout(10):
                while ranks_of(engine, on_first).count(1) != 1:
                    await asyncio.sleep(0.001)
            await asyncio.wait({asyncio.ensure_future(_ends(stream)) for stream in rest}, return_when="FIRST_COMPLETED")
            assert engine.replicas[0].load[1] == len(on_first) - 1, "the others wait"

    run(scenario())


async def _ends(stream: Collector) -> None:
    await stream.wait()


def test_what_may_have_broken_a_worker_breaks_no_other() -> None:
    async def scenario() -> None:
        settings = {"data_parallel_size": 2, "num_gpu_blocks_override": 256}
        async with running({"poison": 666, "step_s": 0.002}, **settings) as engine:
            prompts = [[i + 1, 2, 3] for i in range(6)]
            streams = [submit(engine, ask(prompt, 150, seed=i)) for i, prompt in enumerate(prompts)]
            await given(streams, 3)
            poison = submit(engine, ask([5, 666], 20, request_id="poison"))
            (rank,) = ranks_of(engine, ["poison"])
            await poison.wait()
            assert poison.deltas[-1].finish_reason == "error" and "given up" in str(poison.deltas[-1].error)
            for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                await stream.wait()
                assert stream.tokens() == expected_tokens(prompt, i, engine.spec.vocab_size, 150)
            assert engine.replicas[rank].fault is not None
            assert engine.replicas[1 - rank].fault is None, "the other one has never noticed"
            await settled(engine)

    run(scenario())
