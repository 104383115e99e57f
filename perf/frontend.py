"""The whole path with a worker that returns tokens at once: what the engine process itself costs.

Engine on one core, worker and client on the other. CPU per token is the engine process's own user and system time,
HTTP, scheduling, detokenizing and the ring included. Loop lag is what a GET /health on a kept connection takes beside
the load: it waits for its turn of the loop like everything else.
"""

from __future__ import annotations

import statistics
import threading
import time
from http.client import HTTPConnection

from perf.figure import Measurement, Options, percentile
from perf.serving import drive, instant_server

DESCRIPTION = "HTTP to ring and back with an instant worker: engine CPU per token, tokens/s, TTFT; a burst of 1,000"
STREAMS = (1, 64, 256, 1000)


def measure(options: Options) -> Measurement:
    table, summary, samples = [], {}, {}
    runs = 1 if options.quick else 3
    with instant_server(max_num_seqs=1024) as server:
        drive(server, 64, 64)  # warm
        for num_streams in STREAMS:
            num_tokens = 200 if options.quick else {1: 2000, 64: 1000, 256: 800, 1000: 300}[num_streams]
            rows = [_streams(server, num_streams, num_tokens) for _ in range(runs)]
            row = {key: _median(key, rows) for key in rows[0]}
            table.append(row)
            if num_streams == 256:
                summary["engine_cpu_us_per_token_256"] = row["engine_us_per_token"]
        bursts = [drive(server, 1000, 4) for _ in range(runs)]
        assert server.healthy()
    summary["burst_1000x4_seconds"] = round(statistics.median(burst["seconds"] for burst in bursts), 3)
    summary["burst_errors"] = max(burst["num_errors"] for burst in bursts)
    samples["burst_ttft_s"] = [round(t, 4) for t in bursts[-1]["ttft_s"]]
    return Measurement(summary, table, samples, f"burst errors: {bursts[-1]['errors']}")


def _median(key: str, rows: list[dict]) -> float:
    return round(statistics.median(row[key] for row in rows), 2)


def _streams(server, num_streams: int, num_tokens: int) -> dict:
    before = server.cpu_s()
    with LagProbe(server.port) as probe:
        outcome = drive(server, num_streams, num_tokens)
    cpu = server.cpu_s() - before
    assert outcome["num_errors"] == 0, outcome["errors"]
    total = num_streams * num_tokens
    return {
        "streams": num_streams,
        "tokens_per_s": round(total / outcome["seconds"]),
        "engine_us_per_token": cpu / total * 1e6,
        "ttft_p50_ms": percentile(outcome["ttft_s"], 50) * 1e3,
        "itl_p50_ms": percentile(outcome["gaps_s"], 50) * 1e3,
        "itl_p99_ms": percentile(outcome["gaps_s"], 99) * 1e3,
        "loop_lag_p50_ms": percentile(probe.lags_s, 50) * 1e3,
        "loop_lag_p99_ms": percentile(probe.lags_s, 99) * 1e3,
    }


class LagProbe(threading.Thread):
    """Asks for /health every 20 ms while it is entered."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._connection = HTTPConnection("127.0.0.1", port)
        self._stop_asked = threading.Event()
        self.lags_s: list[float] = []

    def run(self) -> None:
        while not self._stop_asked.wait(0.02):
            began = time.perf_counter()
            self._connection.request("GET", "/health")
            assert self._connection.getresponse().read()
            self.lags_s.append(time.perf_counter() - began)

    def __enter__(self) -> LagProbe:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_asked.set()
        self.join()
        self._connection.close()
