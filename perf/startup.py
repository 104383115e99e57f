"""From launch to the first token of the real model, as a person would see it: process start to first SSE event."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil

from perf.figure import ROOT, Measurement, Options
from perf.serving import Running, free_port

DESCRIPTION = "launch of `slipring serve smollm2` to its first streamed token, and what is resident then"


def measure(options: Options) -> Measurement:
    runs = [_run() for _ in range(1 if options.quick else 5)]
    runs.sort(key=lambda run: run["first_token_seconds"])
    middle = runs[len(runs) // 2]
    samples = {"first_token_seconds": [run["first_token_seconds"] for run in runs]}
    return Measurement({**middle}, [middle], samples)


def _run() -> dict:
    port = free_port()
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "slipring.http.cli", "serve", "smollm2", "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    running = Running(process, port)
    while not running.healthy():
        assert process.poll() is None
        time.sleep(0.01)
    ready = time.perf_counter() - began
    _first_token(port)
    first = time.perf_counter() - began
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "the engine process maps libtorch"
    (worker,) = running.stats.children()
    result = {
        "first_token_seconds": round(first, 2),
        "ready_seconds": round(ready, 2),
        "engine_rss_mb": round(running.rss() / 1e6),
        "worker_rss_mb": round(psutil.Process(worker.pid).memory_info().rss / 1e6),
    }
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    return result


def _first_token(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "stream": True, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return
    raise AssertionError("no token came")
