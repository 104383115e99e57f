"""A small model served end to end on the device: latencies that a client sees, and where a decode step's time goes.

Whether the engine can serve on the device is found by asking it to: a refusal is reported as `not available`, in the
engine's words. The model is SmolLM2 from its package. Under `--dry` the same is done with the CPU worker.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.figure import ROOT
from perf.serving import Running, free_port

PROMPT = "The three primary colours are"
REFUSALS = ("must be one of", "not supported", "the kernels are made for", "needs a package", "No module named")


class NotAvailable(Exception):
    """What this machine or this engine lacks, in words."""


def die_with_parent() -> None:
    """For a child, before it becomes its program: a check that is killed leaves nothing behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@dataclass(frozen=True)
class Stream:
    text: str
    ttft_s: float
    gaps_s: list[float]


def served(device: str, streams: int, num_tokens: int, start_s: float = 90.0) -> dict[str, Any]:
    """Raises NotAvailable; AssertionError when what was served is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        steps = Path(directory) / "steps"
        running = _start(device, steps, Path(directory) / "said", start_s)
        try:
            ask(running.port, 4)  # the first request meets first-time costs
            alone = ask(running.port, num_tokens)
            with ThreadPoolExecutor(streams) as pool:
                together = list(pool.map(lambda _: ask(running.port, num_tokens), range(streams)))
        finally:
            running.process.send_signal(signal.SIGTERM)
            running.process.wait(20)
        told, *rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert told["device"].split(":")[0] == device.split(":")[0], f"the worker ran on {told['device']}, not {device}"
    assert alone.text and any(stream.text == alone.text for stream in together), "a greedy answer did not come again"
    result: dict[str, Any] = {**told, "one_stream": _latencies([alone]), f"{streams}_streams": _latencies(together)}
    return result | {"decode_steps": breakdown(rows, alone)}


def _start(device: str, steps: Path, said: Path, start_s: float) -> Running:
    port = free_port()
    flags = ["--port", str(port), "--device", device, "--max-model-len", "1024", "--max-num-seqs", "64"]
    command = [sys.executable, "-m", "slipring.http.cli", "serve", "smollm2", *flags]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "OMP_NUM_THREADS")
    }
    with said.open("w") as out:
        process = subprocess.Popen(
            [*command, "--worker-module", "perf.timed_worker"],
            cwd=ROOT, env=environment | {"TIMED_WORKER_FILE": str(steps)}, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    running, deadline = Running(process, port), time.monotonic() + start_s
    while not running.healthy():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            _raise_start(said.read_text(), start_s)
        time.sleep(0.05)
    return running


def _raise_start(said: str, start_s: float) -> None:
    lines = [line for line in said.splitlines() if line.strip()] or [f"nothing was said within {start_s:.0f} s"]
    refusal = next((line for line in lines if any(words in line for words in REFUSALS)), None)
    if refusal:
        raise NotAvailable(f"the engine does not serve on this device: {refusal.strip()}")
    raise AssertionError("the server did not start: " + " | ".join(lines[-5:]))


def ask(port: int, num_tokens: int) -> Stream:
    """One greedy completion, streamed and timed."""
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20) as response:
        body["model"] = json.load(response)["data"][0]["id"]
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    began, times, text = time.perf_counter(), [], ""
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]) and choices[0]["text"]:
                times.append(time.perf_counter())
                text += choices[0]["text"]
    assert times, "no token came"
    return Stream(text, times[0] - began, [b - a for a, b in itertools.pairwise(times)])


def _latencies(streams: list[Stream]) -> dict[str, float]:
    gaps = sorted(gap for stream in streams for gap in stream.gaps_s)
    found = {"ttft_ms": 1e3 * statistics.median(stream.ttft_s for stream in streams)}
    if gaps:
        found |= {"itl_p50_ms": 1e3 * statistics.median(gaps), "itl_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))]}
    return {name: round(value, 3) for name, value in found.items()}


def breakdown(rows: list[list[float]], alone: Stream) -> dict[str, dict[str, float]]:
    """By number of rows: medians over decode steps of [rows, tokens, forward us, sampling us, all us]."""
    found = {}
    for num_rows in sorted({row[0] for row in rows}):
        steps = [row[2:] for row in rows if row[0] == row[1] == num_rows]
        if len(steps) < 3:
            continue
        forward, sample, whole = (statistics.median(column) for column in zip(*steps, strict=True))
        parts = {"steps": len(steps), "forward_us": forward, "sample_us": sample, "worker_us": whole}
        if num_rows == 1 and alone.gaps_s:
            # What a client waits for between tokens beyond the worker: engine, HTTP, and the client itself.
            parts["engine_and_http_us"] = round(1e6 * statistics.median(alone.gaps_s) - whole, 1)
        found[f"{int(num_rows)}_rows"] = parts
    return found
