"""A real server process for tests: start it, look at it, hurt it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_BOOKS = (
    "slipring:num_requests_running", "slipring:num_requests_waiting", "slipring:num_blocks", "slipring:num_free_blocks",
)  # fmt: skip
_RUNNING: dict[str, Server] = {}
"""By URL, for `alive`."""


class Server:
    """`slipring serve smollm2 ARGUMENTS` on a free port; a context manager that waits until it is ready."""

    def __init__(self, *arguments: str, model: str = "smollm2", environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        serve = [sys.executable, "-m", "slipring.http.cli", "serve", model]
        self._command = [*serve, "--port", str(self.port), "--no-access-log", *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[str]
        self.output = ""
        self.baseline: tuple[list[int], str] | None = None
        """Process ids and the canary's text, as `alive` first saw them."""

    def launch(self) -> Server:
        """Start the process without waiting."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=self._environment
        )
        return self

    def __enter__(self) -> Server:
        self.launch()
        deadline = time.monotonic() + 240
        while self.health() != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(f"the server did not start:\n{self.process.communicate()[0]}")
            time.sleep(0.05)
        _RUNNING[self.url] = self
        return self

    def __exit__(self, *_: object) -> None:
        _RUNNING.pop(self.url, None)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.output = self.process.communicate(timeout=20)[0]
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise

    def health(self) -> int | None:
        """Status of GET /health; None while nothing listens."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def gauge(self, name: str) -> float:
        """A metric's value from /metrics, by the beginning of its line; the sum over replicas."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith((name + " ", name + "{"))]
        assert lines, f"there is no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def post(self, path: str, body: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read())

    def held(self) -> dict[str, float]:
        """What live requests hold, by gauge; empty when everything is free."""
        gauges: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            name, _, rest = line.partition("{")
            if name in _BOOKS:
                gauges[name] = gauges.get(name, 0.0) + float(rest.rsplit(" ", 1)[1])
        running, waiting, total, free = (gauges[name] for name in _BOOKS)
        held = {"running": running, "waiting": waiting, "blocks": total - free}
        return {name: count for name, count in held.items() if count}

    @property
    def worker_pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]


def server_at(url: str) -> Server:
    return _RUNNING[url]


def alive(url: str) -> None:
    """What must hold after any input: healthy, the same processes, the same greedy text, every row and block free."""
    server = server_at(url)
    pids = [server.process.pid, *server.worker_pids]
    assert server.process.poll() is None and server.health() == 200
    canary = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "seed": 1}
    text = server.post("/v1/completions", canary)["choices"][0]["text"]
    server.baseline = server.baseline or (pids, text)
    assert (pids, text) == server.baseline
    deadline = time.monotonic() + 30  # what a client has left is ended within a step
    while held := server.held():
        assert time.monotonic() < deadline, f"not given back: {held}"
        time.sleep(0.05)
