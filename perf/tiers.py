"""KV tiers on the real model: time to first token of conversations that the device's pool cannot hold, against
recomputation (`tier_talks`); what transfers cost the streams beside them (`tier_streams`); and how the eviction
policies compare on fixed traces (`tier_traces`).

All engines must give the same tokens (float32; near ties are excused, as everywhere). Takes about nine minutes on two
cores.
"""

from __future__ import annotations

import uvloop

from perf.figure import Measurement, Options, percentile
from perf.tier_streams import Streams
from perf.tier_talks import NUM_TALKS, Talks
from perf.tier_traces import compare

DESCRIPTION = "64 conversations of 6 turns where the device holds 8: time to first token with tiers, against without"
NUM_STRETCHES = 6


def measure(options: Options) -> Measurement:
    traces = compare(options.seed)
    polluted = next(row for row in traces if row["trace"] == "polluted_by_scans")
    gaps, stream_rows = uvloop.run(Streams(2 if options.quick else NUM_STRETCHES, options.seed).run())
    ttft, talk_rows = uvloop.run(Talks(8 if options.quick else NUM_TALKS, options.seed).run())
    p50 = {row: percentile(samples, 50) for row, samples in ttft.items()}
    p99 = {row: percentile(samples, 99) for row, samples in gaps.items()}
    summary = {
        "ttft_ratio_cpu": round(p50["cpu"] / p50["recomputed"], 3),
        "ttft_ratio_fs": round(p50["fs"] / p50["recomputed"], 3),
        "ttft_ratio_fs_cold": round(p50["fs cold"] / p50["recomputed"], 3),
        "ttft_ratio_device": round(p50["device"] / p50["recomputed"], 3),
        "itl_p99_ratio_during_transfers": round(p99["cpu"] / p99["roomy"], 3),
        "itl_p99_ratio_fs": round(p99["fs"] / p99["roomy"], 3),
        "hit_ratio_lru": float(polluted["lru"]),
        "hit_ratio_arc": float(polluted["arc"]),
        "arc_worst_relative": round(min(float(row["arc"]) / float(row["lru"]) for row in traces) - 1, 4),
    }
    samples = {f"ttft_s_{row}": values for row, values in ttft.items()}
    samples |= {f"gap_s_{row}": values for row, values in gaps.items()}
    return Measurement(summary, talk_rows + stream_rows + traces, samples)
