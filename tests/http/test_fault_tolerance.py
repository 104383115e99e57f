"""The HTTP face of the fault-tolerance commands, and the headers that choose a replica, on a real server."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving import Server

FLAGS = ("--worker-module", "tests.scripted_worker", "--data-parallel-size", "2", "--num-gpu-blocks-override", "64")
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def two() -> Iterator[Server]:
    with Server(*FLAGS, "--api-key", "sesame", "--fault-tolerance-config", '{"auto_recovery": false}') as server:
        yield server


def call(server: Server, path: str, body: Any = None, headers: dict[str, str] = KEY) -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "Invalid JSON format"),
        ([], "Request body must be a JSON object."),
        ({}, "'instruction' is required."),
        ({"instruction": "explode"}, "Invalid instruction"),
        ({"instruction": {"a": 1}}, "Invalid instruction"),
        ({"instruction": "retry", "params": []}, "'params' must be an object."),
        ({"instruction": "retry", "request_id": ""}, "'request_id'"),
        ({"instruction": "retry", "request_id": 7}, "'request_id'"),
        (
            {"instruction": "drain", "params": {"dp_ranks": [1, 7]}},
            "`dp_ranks` holds [7], which are no ranks: there are 0 to 1.",
        ),
        ({"instruction": "retry", "params": {"dp_ranks": "0"}}, "`dp_ranks` must be a list of one or more ranks."),
        ({"instruction": "scale_down"}, "`removed_dp_ranks` must be a list of one or more ranks."),
        ({"instruction": "scale_down", "params": {"removed_dp_ranks": [-1]}}, "`removed_dp_ranks` holds [-1]"),
    ],
)
def test_malformed_commands(two: Server, prefix: str, body: Any, words: str) -> None:
    status, answer = call(two, f"{prefix}/fault_tolerance/apply", body)
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/fault_tolerance/status", "/fault_tolerance/status"])
def test_status_and_apply_ask_for_the_key(two: Server, path: str) -> None:
    assert call(two, path, headers={})[0] == 401
    assert call(two, path.replace("status", "apply"), {"instruction": "retry"}, headers={})[0] == 401
    assert {rank: entry["status"] for rank, entry in call(two, path)[1].items()} == {"0": "healthy", "1": "healthy"}


def test_a_command_is_accepted_then_polled(two: Server) -> None:
    victim = two.worker_pids[0]
    os.kill(victim, signal.SIGKILL)
    sick = poll(two, lambda ranks: [entry for entry in ranks.values() if entry["status"] == "unhealthy"])
    assert sick[0]["fault_info"] == "WORKER_EXIT" and "SIGKILL" in sick[0]["reason"]
    assert two.health() == 200, "the other replica serves"
    rank = sick[0]["id"]
    pinned = {**KEY, "X-data-parallel-rank": str(rank)}
    status, answer = call(two, "/v1/completions", {"prompt": "a", "max_tokens": 2}, pinned)
    assert status == 503 and f"rank {rank}" in answer["error"]["message"]
    assert call(two, "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    status, answer = call(two, "/v1/fault_tolerance/apply", {"instruction": "retry", "params": {}, "request_id": "r1"})
    assert (status, answer["request_id"]) == (202, "r1") and "/v1/fault_tolerance/status" in answer["message"]
    poll(two, lambda ranks: all(entry["status"] == "healthy" for entry in ranks.values()))
    command = poll(two, lambda ranks: ranks[str(rank)].get("last_command"))
    assert command["request_id"] == "r1" and command["instruction"] == "retry"
    assert call(two, "/v1/completions", {"prompt": "a", "max_tokens": 2}, pinned)[0] == 200
    figures = metrics(two)
    assert figures[f'slipring:faults_total{{engine="{rank}",event="worker exit",model_name="smollm2"}}'] == 1
    assert figures['slipring:replicas{engine="0",model_name="smollm2",state="healthy"}'] == 2
    assert figures[f'slipring:fault_recovery_seconds_count{{engine="{rank}",model_name="smollm2"}}'] == 1
    status, answer = call(two, "/fault_tolerance/apply", {"instruction": "retry"})
    assert status == 202 and answer["request_id"], "as in vLLM, also when there is nothing to retry"


def test_the_status_answers_while_a_worker_stands_still(two: Server) -> None:
    """A stopped worker neither ends nor answers; the loop waits for nobody."""
    ask = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
    pinned = {**KEY, "X-data-parallel-rank": "0"}
    pids = two.worker_pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(call, two, "/v1/completions", ask, pinned)
            poll(two, lambda ranks: metrics(two)['vllm:num_requests_running{engine="0",model_name="smollm2"}'] == 1)
            status, ranks = call(two, "/v1/fault_tolerance/status")
            assert status == 200 and {entry["status"] for entry in ranks.values()} == {"healthy"}
            assert not waiting.done(), "its step is not back"
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            status, answer = waiting.result()
            assert status == 200 and answer["usage"]["completion_tokens"] == 3
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("rank", ["2", "-1", "one", "1.0", ""])
def test_a_rank_that_there_is_not(two: Server, rank: str) -> None:
    headers = {**KEY, "X-data-parallel-rank": rank}
    status, answer = call(two, "/v1/completions", {"prompt": "a", "max_tokens": 2}, headers)
    assert status == 400 and answer["error"]["param"] == "X-data-parallel-rank"


def test_without_the_flag_there_is_nothing(server: str) -> None:
    request = urllib.request.Request(server + "/v1/fault_tolerance/status")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 404


def metrics(server: Server) -> dict[str, float]:
    request = urllib.request.Request(server.url + "/metrics", headers=KEY)
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def poll(server: Server, found: Any) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found(call(server, "/v1/fault_tolerance/status")[1])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
