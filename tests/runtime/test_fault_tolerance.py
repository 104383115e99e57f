"""The protocol of the fault-tolerance commands: accepted where the state allows, refused with the reason elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from slipring.runtime.engine import Engine, HealthState
from slipring.runtime.fault_tolerance import BadCommand, FaultToleranceRequest, FaultToleranceResult
from slipring.runtime.request import EngineDeadError
from slipring.runtime.supervisor import State
from tests.runtime.test_engine import ask, run, running, submit
from tests.runtime.test_recovery import given
from tests.simulated_device import expected_tokens
from tests.waits import settled

WAITING = {"auto_recovery": False}


async def apply(engine: Engine, instruction: str, request_id: str = "", **params: Any) -> FaultToleranceResult:
    request_id = request_id or f"{instruction}-{os.urandom(4).hex()}"
    result = await engine.fault_tolerance.apply(FaultToleranceRequest(instruction, params, request_id))
    assert result is not None and result.request_id == request_id
    return result


async def broken(engine: Engine, rank: int = 0) -> None:
    os.kill(engine.worker_pids[rank], signal.SIGKILL)
    while engine.replicas[rank].state is not State.UNHEALTHY:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("instruction", ["retry", "restart_workers"])
def test_a_restart_is_for_the_unhealthy_only(instruction: str) -> None:
    async def scenario() -> None:
        async with running(**WAITING) as engine:
            refused = await apply(engine, instruction)
            assert not refused.success and "status is HEALTHY" in str(refused.reason)
            stream = submit(engine, ask([1], 300))
            await given([stream], 3)
            await broken(engine)
            (status,) = engine.fault_tolerance.status().values()
            assert status["status"] == "unhealthy" and status["fault_info"] == "WORKER_EXIT"
            assert "SIGKILL" in status["reason"]
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                submit(engine, ask([2]))
            assert (await apply(engine, instruction, "once")).success
            assert (await apply(engine, instruction, "once")).success, "the same request is not carried out twice"
            (status,) = engine.fault_tolerance.status().values()
            assert status["status"] == "healthy" and "reason" not in status
            assert status["last_command"] == {
                "request_id": "once", "instruction": instruction, "success": True, "reason": None,
            }  # fmt: skip
            await stream.wait()
            assert stream.tokens() == expected_tokens([1], 1, engine.spec.vocab_size, 300)
            await settled(engine)

    run(scenario())


def test_a_command_while_another_recovers_is_refused() -> None:
    async def scenario() -> None:
        async with running(**WAITING) as engine:
            await broken(engine)
            first = asyncio.ensure_future(apply(engine, "retry"))
            await asyncio.sleep(0)
            second = await apply(engine, "retry")
            assert not second.success and "RECOVERING" in str(second.reason)
            assert (await first).success

    run(scenario())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "removed_dp_ranks"),
        ({"removed_dp_ranks": []}, "one or more"),
        ({"removed_dp_ranks": "0"}, "list"),
        ({"removed_dp_ranks": [True]}, "list"),
        ({"removed_dp_ranks": [2]}, "0 to 1"),
        ({"removed_dp_ranks": [-1]}, "0 to 1"),
        ({"removed_dp_ranks": [1]}, "engine 1: status is HEALTHY"),
        ({"removed_dp_ranks": [0, 1]}, "leave no rank"),
        ({"removed_dp_ranks": [0]}, "dp_store_port"),
        ({"removed_dp_ranks": [0], "dp_store_port": 99999, "dp_master_ip": "127.0.0.1"}, "dp_store_port"),
        ({"removed_dp_ranks": [0], "dp_store_port": 4000}, "dp_master_ip"),
        ({"removed_dp_ranks": [0], "dp_store_port": 4000, "dp_master_ip": "no address"}, "dp_master_ip"),
    ],
)
def test_what_scale_down_refuses_changes_nothing(params: dict[str, Any], words: str) -> None:
    async def scenario() -> None:
        async with running(data_parallel_size=2, **WAITING) as engine:
            await broken(engine)
            result = await apply(engine, "scale_down", **params)
            assert not result.success and words in str(result.reason)
            assert [replica.state for replica in engine.replicas] == [State.UNHEALTHY, State.HEALTHY]

    run(scenario())


@pytest.mark.parametrize(
    ("instruction", "params", "param"),
    [
        ("drain", {"dp_ranks": [7]}, "dp_ranks"),
        ("replace", {"dp_ranks": []}, "dp_ranks"),
        ("retry", {"dp_ranks": [0.0]}, "dp_ranks"),
        ("scale_down", {}, "removed_dp_ranks"),
        ("scale_down", {"removed_dp_ranks": [1]}, "removed_dp_ranks"),
    ],
)
def test_ranks_that_there_are_not_are_known_before_anything_is_done(
    instruction: str, params: dict[str, Any], param: str
) -> None:
    async def scenario() -> None:
        async with running() as engine:
            with pytest.raises(BadCommand, match=r"one or more ranks|there is rank 0 alone") as caught:
                engine.fault_tolerance.check(FaultToleranceRequest(instruction, params, "x"))
            assert caught.value.param == f"params.{param}"
            engine.fault_tolerance.check(FaultToleranceRequest("drain", {"dp_ranks": [0]}, "y"))

    run(scenario())


def test_a_removed_rank_cannot_be_removed_again() -> None:
    async def scenario() -> None:
        async with running(data_parallel_size=2, **WAITING) as engine:
            await broken(engine, 1)
            assert (await apply(engine, "scale_down", removed_dp_ranks=[1])).success
            assert "already" in str((await apply(engine, "scale_down", removed_dp_ranks=[1])).reason)
            assert "REMOVED" in str((await apply(engine, "retry", dp_ranks=[1])).reason)
            assert engine.fault_tolerance.status()["1"]["status"] == "dead"
            await submit(engine, ask([1], 3)).wait()

    run(scenario())


def test_replace_under_traffic_loses_nothing() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.002}, data_parallel_size=2) as engine:
            before = engine.worker_pids
            streams = [submit(engine, ask([i], 60, seed=i)) for i in range(8)]
            await given(streams, 2)
            replacing = asyncio.ensure_future(apply(engine, "replace"))
            more = []
            while not replacing.done():
                more.append(await submit(engine, ask([3, len(more)], 2, seed=len(more))).wait())
            assert (await replacing).success
            assert not set(before) & set(engine.worker_pids)
            for i, stream in enumerate(streams):
                await stream.wait()
                assert stream.tokens() == expected_tokens([i], i, engine.spec.vocab_size, 60)
            for i, stream in enumerate(more):
                assert stream.tokens() == expected_tokens([3, i], i, engine.spec.vocab_size, 2)
            await settled(engine)

    run(scenario())


def test_a_drained_replica_rests_until_it_is_called_back() -> None:
    async def scenario() -> None:
        async with running(data_parallel_size=2) as engine:
            pid = engine.worker_pids[0]
            assert (await apply(engine, "drain", dp_ranks=[0])).success
            assert engine.fault_tolerance.status()["0"]["state"] == "drained"
            while os.path.exists(f"/proc/{pid}"):
                await asyncio.sleep(0.01)
            with pytest.raises(EngineDeadError, match="drained"):
                submit(engine, ask([1], data_parallel_rank=0))
            await submit(engine, ask([1], 3)).wait()
            assert (await apply(engine, "retry", dp_ranks=[0])).success
            await submit(engine, ask([1], 3, data_parallel_rank=0)).wait()

    run(scenario())


def test_without_a_command_in_time_the_replica_is_dead() -> None:
    async def scenario() -> None:
        async with running(engine_recovery_timeout_sec=0.3, **WAITING) as engine:
            stream = submit(engine, ask([1], 500))
            await given([stream], 3)
            await broken(engine)
            assert "SIGKILL" in await asyncio.wait_for(engine.wait_dead(), 60)
            assert engine.health().state is HealthState.DEAD
            assert stream.deltas[-1].finish_reason == "error"
            assert "status is DEAD" in str((await apply(engine, "retry")).reason)

    run(scenario())


def test_a_worker_that_breaks_while_it_is_replaced_is_replaced_all_the_same() -> None:
    """Its last blocks are on their way into a tier."""

    async def scenario() -> None:
        limits = {"data_parallel_size": 2, "kv_offloading_size": 0.05, "block_size": 16}
        async with running({"move_s": 60.0}, **limits) as engine:
            await submit(engine, ask(list(range(64)), 4, data_parallel_rank=0)).wait()
            before = engine.worker_pids
            replacing = asyncio.ensure_future(apply(engine, "replace", dp_ranks=[0]))
            await asyncio.wait_for(engine.replicas[0].settled([State.RECOVERING]), 40)
            os.kill(before[0], signal.SIGKILL)
            assert (await asyncio.wait_for(replacing, 40)).success
            assert engine.worker_pids[0] != before[0] and engine.worker_pids[1] == before[1]
            await submit(engine, ask([5], 4, data_parallel_rank=0)).wait()

    run(scenario())
