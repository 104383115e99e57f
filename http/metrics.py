"""GET /metrics: the engine's plain counters and our own request counts, as Prometheus text.

The engine counts in plain integers; only a scrape turns them into Prometheus families. Names are vLLM's, so that its
dashboards work, plus `slipring_http_requests_total`. Label values come from our own tables, never from clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipring.http.exchange import ApiResponse

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine
    from slipring.runtime.metrics import Histogram, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})

_GAUGES = (
    ("vllm:num_requests_running", "Completions in the running batch.", "num_running"),
    ("vllm:num_requests_waiting", "Completions waiting to be scheduled.", "num_waiting"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks held by live requests; 1 is all.", "kv_cache_usage"),
    ("slipring:num_blocks", "KV blocks in the pool.", "num_blocks"),
    ("slipring:num_free_blocks", "KV blocks that no live request holds.", "num_free_blocks"),
    ("slipring:num_cached_blocks", "Free KV blocks whose content may still be reused.", "num_cached_blocks"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens"),
    ("vllm:generation_tokens", "Generated tokens.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    ("vllm:num_preemptions", "Requests preempted because KV blocks ran out.", "num_preemptions"),
    ("slipring:steps", "Steps published to the workers.", "num_steps"),
    ("slipring:rejected_requests", "Requests refused because the queue was full.", "num_rejected"),
)
_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From submission to the first token.", "ttft_s"),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a completion.", "itl_s"),
    ("vllm:e2e_request_latency_seconds", "From submission to the last token.", "e2e_s"),
)


class RequestCounter:
    """HTTP requests by method, route and status."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def count(self, method: str, route: str, status: int) -> None:
        self.counts[method if method in _METHODS else "other", route, str(status)] += 1


def exposition(engine: Engine | None, model_name: str, counter: RequestCounter) -> ApiResponse:
    registry = CollectorRegistry()
    registry.register(_Snapshot(engine, model_name, counter))
    return ApiResponse(200, generate_latest(registry), {"Content-Type": CONTENT_TYPE})


class _Snapshot(Collector):
    def __init__(self, engine: Engine | None, model_name: str, counter: RequestCounter) -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._counter = counter

    def collect(self) -> Iterator[Metric]:
        yield self._requests()
        if self._engine is not None:
            yield from self._engine_families(self._engine.stats())

    def _requests(self) -> Metric:
        names = ["method", "route", "status"]
        family = CounterMetricFamily("slipring_http_requests", "HTTP requests answered.", labels=names)
        for labels, value in self._counter.counts.items():
            family.add_metric(labels, value)
        return family

    def _engine_families(self, stats: Stats) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, getattr(stats, field))
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Completions by how they ended.", labels=[*names, "finished_reason"]
        )
        for reason, count in stats.finished.items():
            success.add_metric([*values, reason], count)
        yield success
        for name, text, field in _HISTOGRAMS:
            yield self._histogram(name, text, getattr(stats, field))

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Prometheus wants running sums; the engine keeps one count per bucket."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family
