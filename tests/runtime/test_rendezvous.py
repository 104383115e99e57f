"""Where a group of workers meets: a port that is free until they take it, another one in each epoch."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from slipring.runtime.engine import StartupError
from slipring.runtime.fault_tolerance import FaultToleranceRequest
from slipring.runtime.rendezvous import Rendezvous
from slipring.runtime.supervisor import State
from tests.runtime.test_engine import ask, healthy, run, running, submit
from tests.runtime.test_fault_tolerance import broken


def test_a_reserved_port_is_nobody_elses_and_answers_nobody() -> None:
    point = Rendezvous().reserve()
    with pytest.raises(OSError, match="in use"):
        socket.create_server((point.host, point.port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((point.host, point.port), timeout=5)
    point.close()
    socket.create_server((point.host, point.port)).close()


def test_ports_do_not_come_again_soon() -> None:
    rendezvous, ports = Rendezvous(), []
    for _ in range(60):
        point = rendezvous.reserve()
        ports.append(point.port)
        point.close()
    assert len(set(ports)) == 60


def test_the_next_group_meets_where_it_was_told() -> None:
    rendezvous = Rendezvous()
    named = rendezvous.reserve()
    named.close()
    rendezvous.move("127.0.0.1", named.port)
    with pytest.raises(OSError) as foreign:
        rendezvous.move("203.0.113.7", named.port)
    assert foreign.value.errno == errno.EADDRNOTAVAIL
    first, second = rendezvous.reserve(), rendezvous.reserve()
    assert first.port == named.port != second.port
    first.close()
    second.close()


GROUP = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
rank, port, fd = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
more = {"master_listen_fd": fd} if rank == 0 else {}
store = TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60), **more)
store.set(f"from {rank}", "hello")
assert store.get(f"from {1 - rank}") == b"hello"
if rank == 0:
    store.get("done")
else:
    store.set("done", "yes")
"""


def test_a_group_of_workers_meets_there() -> None:
    """As tensor shards will: the first serves the store on the socket it was given, the other knows the port."""
    point = Rendezvous().reserve()
    group = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP, str(rank), str(point.port), str(point.fd)],
            pass_fds=[point.fd] if rank == 0 else [],
        )
        for rank in range(2)
    ]
    try:
        assert [member.wait(120) for member in group] == [0, 0]
    finally:
        for member in group:
            member.kill()
            member.wait()
        point.close()


def test_each_epoch_meets_elsewhere() -> None:
    async def scenario() -> None:
        async with running() as engine:
            old = engine.replicas[0].step_loop.epoch
            stream = submit(engine, ask([1], 50))
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            await stream.wait()
            await healthy(engine)
            new = engine.replicas[0].step_loop.epoch
            assert new.number == old.number + 1 and new.meeting.port != old.meeting.port
            assert old.meeting.fd == -1, "given back"
            told = new._worker_config(0)
            assert (told.epoch, told.group_port, told.group_fd) == (new.number, new.meeting.port, new.meeting.fd)

    run(scenario())


def test_removing_rank_0_moves_the_rendezvous() -> None:
    async def scenario() -> None:
        async with running(data_parallel_size=2, auto_recovery=False) as engine:
            await broken(engine)
            with socket.create_server(("127.0.0.1", 0)) as taken:
                params = {"removed_dp_ranks": [0], "dp_master_ip": "127.0.0.1", "dp_store_port": taken.getsockname()[1]}
                refused = await engine.fault_tolerance.apply(FaultToleranceRequest("scale_down", params, "a"))
            assert refused is not None and "`dp_store_port`" in str(refused.reason) and "in use" in str(refused.reason)
            assert engine.replicas[0].state is State.UNHEALTHY
            done = await engine.fault_tolerance.apply(FaultToleranceRequest("scale_down", params, "b"))
            assert done is not None and done.success, done
            await broken(engine, 1)
            retried = await engine.fault_tolerance.apply(FaultToleranceRequest("retry", {"dp_ranks": [1]}, "c"))
            assert retried is not None and retried.success, retried
            assert engine.replicas[1].step_loop.epoch.meeting.port == params["dp_store_port"]

    run(scenario())


def test_a_worker_of_another_epoch_is_refused() -> None:
    async def scenario() -> None:
        async with running({"epoch": 7}):
            pass

    with pytest.raises(StartupError, match="the worker is of epoch 7, this is epoch 1"):
        run(scenario())
