"""Thousands of concurrent streams, each at four tokens a second, and as many as the descriptor limit allows."""

from __future__ import annotations

from perf.figure import Measurement, Options, percentile
from perf.serving import drive, instant_server, raise_descriptor_limit

DESCRIPTION = "1,000 / 5,000 / 9,000 and more concurrent streams: errors, inter-token latency, memory each"


def measure(options: Options) -> Measurement:
    limit = raise_descriptor_limit()
    most = min(10_000, limit // 2 - 500)
    # (streams, milliseconds between tokens, tokens, seconds over which they arrive)
    cases = [(1000, 250, 32, 1.0), (5000, 250, 32, 4.0), (most, 1000, 16, 8.0)]
    table, summary = [], {}
    for num_streams, gap_ms, num_tokens, ramp_s in cases[: 1 if options.quick else None]:
        row = _case(num_streams, gap_ms, num_tokens, ramp_s)
        table.append(row)
        summary = {key: row[key] for key in ("streams", "errors", "itl_p99_ms", "bytes_per_connection")}
    for row in table:
        if row["streams"] == 5000:
            summary |= {"itl_p99_ms_5000": row["itl_p99_ms"], "errors_5000": row["errors"]}
    return Measurement(summary, table, notes=f"descriptor limit {limit}")


def _case(num_streams: int, gap_ms: int, num_tokens: int, ramp_s: float) -> dict:
    with instant_server(max_num_seqs=num_streams, max_model_len=512, step_ms=gap_ms) as server:
        idle = server.rss()
        before = server.cpu_s()
        outcome = drive(server, num_streams, num_tokens, prompt_len=1, ramp_s=ramp_s)
        cpu = server.cpu_s() - before
        grown = server.rss() - idle
        assert server.healthy()
    return {
        "streams": num_streams,
        "tokens_per_s_each": 1000 / gap_ms,
        "errors": outcome["num_errors"],
        "itl_p50_ms": round(percentile(outcome["gaps_s"], 50) * 1e3, 1),
        "itl_p99_ms": round(percentile(outcome["gaps_s"], 99) * 1e3, 1),
        "ttft_p50_ms": round(percentile(outcome["ttft_s"], 50) * 1e3, 1),
        "engine_us_per_token": round(cpu / (num_streams * num_tokens) * 1e6, 1),
        "bytes_per_connection": int(grown / num_streams),
    }
