"""Two real processes over shared memory: exact collectives under skew, and a killed peer that is noticed and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipring.shm.ipc import HandleExchange
from slipring.shm.segment import Segment
from tests.kernels.triton_suite.comm_rank import EPOCH, NUM_EPOCHS, SEGMENT_BYTES, WORLD

ROOT = Path(__file__).parents[3]


@pytest.fixture
def segment() -> Iterator[Segment]:
    shared = Segment.create("test", SEGMENT_BYTES)
    HandleExchange.create(shared, WORLD, EPOCH)
    yield shared
    shared.close()


def start(scenario: str, segment: Segment) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.triton_suite.comm_rank", scenario, str(rank), str(segment.fd),
             str(segment.nbytes)],
            cwd=ROOT, env=dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
            pass_fds=(segment.fd,), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip


def finish(process: subprocess.Popen[str]) -> dict:
    try:
        out, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, out + errors
    return json.loads(out.splitlines()[-1])


def test_collectives_are_exact_under_skew(segment: Segment) -> None:
    for process in start("exact", segment):
        assert finish(process) == dict.fromkeys(("one_shot", "two_shot", "all_to_all"), NUM_EPOCHS)


def test_a_killed_peer_is_noticed_and_named(segment: Segment) -> None:
    survivor, victim = start("killed", segment)
    assert victim.wait(60) == -9
    said = finish(survivor)
    assert said["peer"] == 1
    assert said["drained_s"] < said["noticed_s"], f"twenty launches of a poisoned queue cost less than one wait: {said}"
    victim.communicate()
