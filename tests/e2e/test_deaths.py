"""kill -9 of engine, or engine and worker, in the middle of 16 streams of the real model; and clients that go away.

What happens to streams whose worker dies is `test_recovery.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException

import psutil
import pytest

from tests import dev_shm
from tests.serving import Server

BODY = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True, "temperature": 1}


class Reader(threading.Thread):
    """Reads one stream to its end, whatever that is."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + "/v1/completions", json.dumps(BODY).encode(), headers)
        with contextlib.suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                if line.strip():
                    self.lines.append(line.decode())


def sixteen_streams(server: Server) -> list[Reader]:
    readers = [Reader(server.url) for _ in range(16)]
    deadline = time.monotonic() + 60
    while any(len(reader.lines) < 3 for reader in readers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return readers


def gone_within(seconds: float, pids: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("victims", ["engine", "both"])
def test_kill_nine_leaves_nothing(victims: str) -> None:
    before = dev_shm.names()
    with Server() as server:
        sixteen_streams(server)
        engine, workers = server.process.pid, server.worker_pids
        assert len(workers) == 1
        for pid in {"engine": [engine], "both": [*workers, engine]}[victims]:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        # The engine is our own child: reap it, or it stays a zombie.
        status = server.process.wait(2 - (time.monotonic() - killed))
        assert status == -signal.SIGKILL
        assert gone_within(2 - (time.monotonic() - killed), workers)
        dev_shm.assert_nothing_new(before)


def test_a_client_that_goes_away_frees_its_row_within_two_steps(server: str) -> None:
    """Closed by the client, by a reset, and while its prompt is still being computed."""
    watch = _watcher(server)
    for leave in (_close, _reset, _during_prefill):
        free = watch("slipring:num_free_blocks")
        leave(server, watch)
        steps = watch("slipring:steps_total")
        deadline = time.monotonic() + 30
        while watch("slipring:num_free_blocks") != free or watch("vllm:num_requests_running") != 0:
            assert time.monotonic() < deadline, "row or blocks are still held"
        assert watch("slipring:steps_total") <= steps + 2


def _watcher(url: str) -> Callable[[str], float]:
    def value(name: str) -> float:
        with urllib.request.urlopen(url + "/metrics") as response:
            text = response.read().decode()
        lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        assert lines, f"{name} is not in /metrics"
        return float(lines[0].rsplit(" ", 1)[1])

    return value


def _open(url: str, prompt: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": prompt, "max_tokens": 2000, "stream": True, "ignore_eos": True})
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


def _await_tokens(connection: socket.socket) -> None:
    received = b""
    while received.count(b"data:") < 3:
        received += connection.recv(65536)


def _close(url: str, watch: Callable[[str], float]) -> None:
    connection = _open(url, "a")
    _await_tokens(connection)
    connection.close()


def _reset(url: str, watch: Callable[[str], float]) -> None:
    connection = _open(url, "b")
    _await_tokens(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def _during_prefill(url: str, watch: Callable[[str], float]) -> None:
    connection = _open(url, "word " * 1500)
    while watch("vllm:num_requests_running") == 0:
        pass
    connection.close()
