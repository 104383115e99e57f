"""Server processes for figures: start one, drive it with a client process on another core, read its CPU and memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from perf.figure import ROOT
from perf.instant_worker import drawn
from slipring.runtime.model import open_model


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    port: int
    stats: psutil.Process = field(init=False)

    def __post_init__(self) -> None:
        self.stats = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        """CPU seconds of the engine process alone."""
        times = self.stats.cpu_times()
        return times.user + times.system

    def rss(self) -> int:
        return self.stats.memory_info().rss

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return response.status == 200
        except (OSError, urllib.error.HTTPError):
            return False


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, environment: dict[str, str] | None = None) -> Iterator[Running]:
    raise_descriptor_limit()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    running = Running(process, port)
    try:
        deadline = time.monotonic() + 120
        while not running.healthy():
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextlib.contextmanager
def instant_server(
    max_model_len: int = 2048, max_num_seqs: int = 1024, step_ms: float = 0.0, token_us: float = 0.0
) -> Iterator[Running]:
    port = free_port()
    environment = {"INSTANT_STEP_MS": str(step_ms), "INSTANT_TOKEN_US": str(token_us)}
    flags = {
        "--port": port,
        "--worker-module": "perf.instant_worker",
        "--served-model-name": "instant",
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max(2048, max_num_seqs),
        "--max-model-len": max_model_len,
        "--max-queued-requests": 100_000,
        "--max-queued-tokens": 10**9,
        "--num-gpu-blocks-override": max(65536, max_model_len // 4),
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    command = ["-m", "slipring.http.cli", "serve", "smollm2", "--allow-long-max-model-len", *arguments]
    with serving(command, port, environment) as running:
        # Engine on the first core, worker and client on the last: the engine's own cost is what is measured.
        pin(running.process.pid, first=True)
        for child in running.stats.children():
            pin(child.pid, first=False)
        yield running


def drive(
    running: Running,
    num_streams: int,
    num_tokens: int,
    prompt_len: int = 16,
    ramp_s: float = 0.0,
    steady: bool = False,
) -> dict:
    """Run the client process; returns its outcome (`perf.client.Outcome`)."""
    job = {
        "port": running.port,
        "num_streams": num_streams,
        "num_tokens": num_tokens,
        "prompt": [5] * prompt_len,
        "text": expected_text(prompt_len, num_tokens),
        "ramp_s": ramp_s,
        "timeout_s": 180.0,
        "steady": steady,
    }
    client = subprocess.Popen(
        [sys.executable, "-m", "perf.client"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pin(client.pid, first=False)
    out, _ = client.communicate(json.dumps(job))
    assert client.returncode == 0, "the client failed"
    return json.loads(out)


def expected_text(prompt_len: int, num_tokens: int) -> str:
    """What the instant worker's tokens say."""
    tokens = [int(drawn(prompt_len + i, prompt_len)) for i in range(num_tokens)]
    return open_model("smollm2").tokenizer().decode(tokens)


def pin(pid: int, first: bool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {cores[0] if first else cores[-1]})


def raise_descriptor_limit() -> int:
    """Take as many file descriptors as we may have; returns how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
