"""Plain counters and histograms, kept by the loop itself; `http/` turns a `Stats` into an exposition.

Observing is a bisect and an addition, so that it can be done for each token. Nothing in here knows Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

# Finer than usual at the low end: per-token times of a fast engine lie below a millisecond.
TTFT_BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
ITL_BOUNDS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
E2E_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)


class Histogram(msgspec.Struct):
    """`counts[i]` observations at most `bounds[i]` (and above the bound before it); the last count is the overflow."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.counts.copy(), self.sum)


class Metrics:
    """What one engine counts. Everything only grows."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.rejected = 0
        self.ttft_s = Histogram.empty(TTFT_BOUNDS)
        self.itl_s = Histogram.empty(ITL_BOUNDS)
        self.e2e_s = Histogram.empty(E2E_BOUNDS)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Times are seconds, prefix-cache counts are tokens."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share of the pool's blocks that live requests hold, 0..1."""
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Free blocks whose content can still be reused."""
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    num_steps: int
    num_rejected: int
    finished: dict[str, int]
    ttft_s: Histogram
    itl_s: Histogram
    e2e_s: Histogram
