"""Plain counters and histograms, kept by the loop itself; `stats.py` takes snapshots of them.

Observing is a bisect and an addition, so that it can be done for each token. Nothing in here knows Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

# Finer than usual at the low end, down to a tenth of a millisecond: that is where a fast engine's times lie.
TTFT_BOUNDS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15,
    0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
ITL_BOUNDS = (
    0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0008, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01,
    0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20,
    30, 40, 60, 120, 240, 480, 960,
)  # fmt: skip
TOKEN_BOUNDS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
COUNT_BOUNDS = (1, 2, 5, 10, 20, 50, 100)
FAULT_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 30, 60, 120)
PREEMPTION_BOUNDS = (0, 1, 2, 3, 5, 10, 20)


class Timing(msgspec.Struct, frozen=True):
    """Clock readings of one completion, monotonic seconds; 0 for what it never came to."""

    arrival: float
    scheduled: float
    """It left the waiting line (for the first time)."""
    first_token: float
    last_token: float


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


class RequestHistograms(msgspec.Struct):
    """What is observed once for each completion, when it ends."""

    e2e_s: Histogram
    queue_s: Histogram
    prefill_s: Histogram
    decode_s: Histogram
    inference_s: Histogram
    tpot_s: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    max_tokens: Histogram
    n: Histogram
    preemptions: Histogram

    @classmethod
    def empty(cls) -> RequestHistograms:
        times = {name: Histogram.empty(REQUEST_BOUNDS) for name in ("e2e_s", "queue_s", "prefill_s", "decode_s")}
        return cls(
            **times,
            inference_s=Histogram.empty(REQUEST_BOUNDS),
            tpot_s=Histogram.empty(ITL_BOUNDS),
            prompt_tokens=Histogram.empty(TOKEN_BOUNDS),
            generation_tokens=Histogram.empty(TOKEN_BOUNDS),
            max_tokens=Histogram.empty(TOKEN_BOUNDS),
            n=Histogram.empty(COUNT_BOUNDS),
            preemptions=Histogram.empty(PREEMPTION_BOUNDS),
        )

    def observe(self, timing: Timing, now: float, num_tokens: int) -> None:
        self.e2e_s.observe(now - timing.arrival)
        self.generation_tokens.observe(num_tokens)
        if timing.scheduled:
            self.queue_s.observe(timing.scheduled - timing.arrival)
        if timing.scheduled and timing.first_token:
            self.prefill_s.observe(timing.first_token - timing.scheduled)
            self.decode_s.observe(timing.last_token - timing.first_token)
            self.inference_s.observe(timing.last_token - timing.scheduled)
        if num_tokens > 1:
            self.tpot_s.observe((timing.last_token - timing.first_token) / (num_tokens - 1))

    def copy(self) -> RequestHistograms:
        return RequestHistograms(*[getattr(self, name).copy() for name in self.__struct_fields__])


class FaultCounts(msgspec.Struct):
    """What went wrong with a replica, and how long it took until it was right again."""

    by_event: dict[str, int]
    """Faults by what was seen: `worker exit`, `hang`, ..."""
    detection_s: Histogram
    """From the last sign of life of a worker that was computing to the fault; an upper bound of the detection time."""
    recovery_s: Histogram
    """From a fault to the replica's being healthy again."""
    num_replayed: int = 0
    """Requests put in line again after a fault."""
    num_guilty: int = 0
    """Requests given up because they end every worker."""

    @classmethod
    def empty(cls) -> FaultCounts:
        return cls({}, Histogram.empty(FAULT_BOUNDS), Histogram.empty(FAULT_BOUNDS))

    def copy(self) -> FaultCounts:
        histograms = self.detection_s.copy(), self.recovery_s.copy()
        return FaultCounts(self.by_event.copy(), *histograms, self.num_replayed, self.num_guilty)


class Metrics:
    """What one replica counts. Everything only grows."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.ttft_s = Histogram.empty(TTFT_BOUNDS)
        self.itl_s = Histogram.empty(ITL_BOUNDS)
        self.requests = RequestHistograms.empty()
        self.faults = FaultCounts.empty()
