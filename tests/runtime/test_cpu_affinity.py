"""Lists of CPUs, what is wrong with some, and that every worker, the next ones too, keeps to its own."""

from __future__ import annotations

import os
import signal

import pytest

from slipring.runtime.cpu_affinity import parse_affinity
from tests.runtime.test_engine import ask, healthy, run, running, submit


@pytest.mark.parametrize(
    ("text", "count", "lists"),
    [
        ("0", 1, ((0,),)),
        ("0-3", 1, ((0, 1, 2, 3),)),
        ("0-1|2-3", 2, ((0, 1), (2, 3))),
        (" 3, 0-1 | 2,2 ", 2, ((0, 1, 3), (2,))),
        ("0-3|0-3|5", 3, ((0, 1, 2, 3), (0, 1, 2, 3), (5,))),
    ],
)
def test_lists(text: str, count: int, lists: tuple[tuple[int, ...], ...]) -> None:
    assert parse_affinity(text, count, range(6)) == lists


@pytest.mark.parametrize(
    ("text", "count", "words"),
    [
        ("0|1", 1, "one list of CPUs"),
        ("0-1", 2, "2 lists of CPUs with | between them.*0-1|2-3"),
        ("", 1, "'' is neither a CPU's number nor a range"),
        ("0|", 2, "'' is neither"),
        ("3-1", 1, "'3-1' is neither"),
        ("all", 1, "'all' is neither"),
        ("-1", 1, "'-1' is neither"),
        ("0-999999", 1, "CPU 6 is not among those that this process may use: 0, 1, 2, 3, 4, 5"),
    ],
)
def test_what_is_no_list(text: str, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_affinity(text, count, range(6))


def test_workers_keep_to_their_cpus() -> None:
    async def scenario() -> None:
        cpus = sorted(os.sched_getaffinity(0))
        own = [{cpus[0]}, {cpus[-1]}]
        async with running({}, data_parallel_size=2, cpu_affinity=f"{cpus[0]}|{cpus[-1]}") as engine:
            assert [os.sched_getaffinity(pid) for pid in engine.worker_pids] == own
            stream = submit(engine, ask([1], 50, data_parallel_rank=1))
            before = engine.worker_pids[1]
            os.kill(before, signal.SIGKILL)
            await stream.wait()
            await healthy(engine)
            assert engine.worker_pids[1] != before
            assert [os.sched_getaffinity(pid) for pid in engine.worker_pids] == own
            assert os.sched_getaffinity(0) == set(cpus), "the engine may run anywhere"
            assert [replica._config.num_threads for replica in engine.replicas] == [1, 1]

    run(scenario())
