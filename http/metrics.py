"""GET /metrics: the engine's plain counters and our own request counts, as Prometheus text.

The engine counts in plain integers; only a scrape turns them into Prometheus families, and into text in a thread.
Each family is known as `slipring:NAME` and, where vLLM has it too, as `vllm:NAME`, so that its dashboards work;
`--metrics-names` chooses. Label values come from our own tables and settings, never from clients. `engine` is a
replica's rank, as in vLLM; what belongs to no replica (refused requests, replicas by state, tiers) is under engine 0.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipring.http.exchange import ApiResponse
from slipring.http.tier_metrics import cached_by_source, tier_counters, tier_gauges
from slipring.runtime.metrics import REQUEST_BOUNDS, Histogram

if TYPE_CHECKING:
    from slipring.http.config import ServerConfig
    from slipring.runtime.engine import Engine
    from slipring.runtime.stats import ReplicaStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OWN = "slipring:"
NAMES = {"slipring": (_OWN,), "vllm": ("vllm:",), "both": (_OWN, "vllm:")}
"""`--metrics-names`, and the prefixes that it stands for. What vLLM has not is ours in any case."""
Part = Callable[["ReplicaStats"], Any]
"""Which part of a replica's stats a family's field belongs to."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})


class Family(NamedTuple):
    name: str
    """After the prefix."""
    text: str
    field: str
    """Of `ReplicaStats`, or of its `requests` or `faults`."""
    in_vllm: bool = True


_GAUGES = (
    Family("num_requests_running", "Completions in the running batch.", "num_running"),
    Family("num_requests_waiting", "Completions waiting to be scheduled.", "num_waiting"),
    Family("kv_cache_usage_perc", "Share of KV blocks held by live requests; 1 is all.", "kv_cache_usage"),
    Family("num_blocks", "KV blocks in the pool.", "num_blocks", False),
    Family("num_free_blocks", "KV blocks that no live request holds.", "num_free_blocks", False),
    Family("num_cached_blocks", "Free KV blocks whose content may still be reused.", "num_cached_blocks", False),
)
_COUNTERS = (
    Family("prompt_tokens", "Prompt tokens of accepted requests.", "prompt_tokens"),
    Family("prompt_tokens_cached", "Prompt tokens that were not computed.", "prefix_cache_hits"),
    Family("generation_tokens", "Generated tokens.", "generation_tokens"),
    Family("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    Family("prefix_cache_hits", "Prompt tokens found there, on the device.", "local_cache_hits"),
    Family("num_preemptions", "Requests preempted because KV blocks ran out.", "num_preemptions"),
    Family("steps", "Steps published to the workers.", "num_steps", False),
)
_SPECULATION = (
    Family("spec_decode_num_drafts", "Times that drafts were verified for a row.", "num_drafts"),
    Family("spec_decode_num_draft_tokens", "Draft tokens verified.", "num_draft_tokens"),
    Family("spec_decode_num_accepted_tokens", "Draft tokens accepted.", "num_accepted_tokens"),
)
_PER_POSITION = Family(
    "spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens accepted, by their place in the chain.",
    "num_accepted_per_position",
)
_TOKEN_HISTOGRAMS = (
    Family("time_to_first_token_seconds", "From submission to the first token.", "ttft_s"),
    Family("inter_token_latency_seconds", "Between two tokens of a completion.", "itl_s"),
)
_REQUEST_HISTOGRAMS = (
    Family("e2e_request_latency_seconds", "From submission to the last token.", "e2e_s"),
    Family("request_queue_time_seconds", "From submission to the first step.", "queue_s"),
    Family("request_prefill_time_seconds", "From the first step to the first token.", "prefill_s"),
    Family("request_decode_time_seconds", "From the first token to the last.", "decode_s"),
    Family("request_inference_time_seconds", "From the first step to the last token.", "inference_s"),
    Family("request_time_per_output_token_seconds", "A completion's mean time for a token after the first.", "tpot_s"),
    Family("request_prompt_tokens", "Prompt tokens of a request.", "prompt_tokens"),
    Family("request_generation_tokens", "Generated tokens of a completion.", "generation_tokens"),
    Family("request_params_max_tokens", "max_tokens of a request, cut to what fits.", "max_tokens"),
    Family("request_params_n", "Completions asked for by a request.", "n"),
    Family("request_num_preemptions", "Preemptions of a completion.", "preemptions"),
)
_SUCCESS = Family("request_success", "Completions by how they ended.", "finished")
_SOURCES = Family("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "")
_CACHED_SOURCES = Family("prompt_tokens_cached_by_source", "Prompt tokens not computed, by what had their KV.", "")
_REJECTED = Family("rejected_requests", "Requests refused because the queue was full.", "num_rejected", False)
_REPLICAS = Family("replicas", "Replicas by state.", "num_in_state", False)
_FAULTS = Family("faults", "Faults of replicas by what was seen.", "by_event", False)
_FAULT_COUNTERS = (
    Family("replayed_requests", "Requests put in line again after a fault.", "num_replayed", False),
    Family("guilty_requests", "Requests given up because they end every worker.", "num_guilty", False),
)
_FAULT_HISTOGRAMS = (
    Family("fault_detection_seconds", "From a worker's last sign of life to its fault.", "detection_s", False),
    Family("fault_recovery_seconds", "From a fault to the replica's health.", "recovery_s", False),
)
_CACHE_CONFIG = Family("cache_config_info", "The KV cache, told by labels; always 1.", "cache_config")

_ENGINE_WIDE = "0"
"""The `engine` of what belongs to no replica."""


class Sample(NamedTuple):
    """One line of a family, or one histogram of it."""

    engine: str
    labels: tuple[str, ...]
    """Values of the family's own labels."""
    value: tuple[Any, ...]
    """As prometheus_client's `add_metric` takes it: a number, or buckets and a sum."""


class RequestCounter:
    """HTTP requests by method, route and status, and how long they took by route."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.seconds: dict[str, Histogram] = {}

    def count(self, method: str, route: str, status: int) -> None:
        self.counts[method if method in _METHODS else "other", route, str(status)] += 1

    def observe(self, route: str, seconds: float) -> None:
        """From the request's head to the answer's last byte, streams included."""
        if (histogram := self.seconds.get(route)) is None:
            histogram = self.seconds[route] = Histogram.empty(REQUEST_BOUNDS)
        histogram.observe(seconds)


async def exposition(engine: Engine | None, config: ServerConfig, counter: RequestCounter) -> ApiResponse:
    registry = CollectorRegistry()
    registry.register(_Snapshot(engine, config, counter))
    ProcessCollector(registry=registry)
    return ApiResponse(200, await asyncio.to_thread(generate_latest, registry), {"Content-Type": CONTENT_TYPE})


class _Snapshot(Collector):
    """Everything is read when it is made, on the loop; `collect` only works on the copies."""

    def __init__(self, engine: Engine | None, config: ServerConfig, counter: RequestCounter) -> None:
        self._prefixes = NAMES[config.metrics_names]
        self._counts = counter.counts.copy()
        self._seconds = {route: histogram.copy() for route, histogram in counter.seconds.items()}
        self._model = config.served_model_names[0]
        self._stats = None if engine is None else engine.stats()
        by_rank = () if self._stats is None else self._stats.by_rank
        self._replicas = [(str(rank), stats) for rank, stats in enumerate(by_rank)]

    def describe(self) -> list[Metric]:
        return []  # or registering would collect, just to learn the names

    def collect(self) -> Iterator[Metric]:
        yield self._requests()
        yield self._durations()
        if self._stats is None:
            return
        for family in _GAUGES:
            yield from self._numbers(GaugeMetricFamily, family)
        for family in _COUNTERS:
            yield from self._numbers(CounterMetricFamily, family)
        if self._stats.num_accepted_per_position is not None:
            yield from self._speculation()
        yield from self._by_label(_SUCCESS, "finished_reason", lambda stats: stats.finished)
        yield from self._by_label(_SOURCES, "source", _sources)
        yield from self._info()
        yield from self._faults()
        yield from self._engine_wide(CounterMetricFamily, _REJECTED, {(): self._stats.num_rejected})
        cached = cached_by_source(self._stats.prefix_cache_hits, self._stats.tiers)
        by_source = {(source,): count for source, count in cached.items()}
        yield from self._engine_wide(CounterMetricFamily, _CACHED_SOURCES, by_source, ("source",))
        states = {(state,): count for state, count in self._stats.num_in_state.items()}
        yield from self._engine_wide(GaugeMetricFamily, _REPLICAS, states, ("state",))
        if self._stats.tiers is not None:
            for kind, readings in ((GaugeMetricFamily, tier_gauges), (CounterMetricFamily, tier_counters)):
                for reading in readings(self._stats.tiers):
                    family = Family(reading.name, reading.text, "", reading.in_vllm)
                    yield from self._engine_wide(kind, family, reading.values, reading.labels)
        for family in _TOKEN_HISTOGRAMS:
            yield from self._histograms(family, lambda stats: stats)
        for family in _REQUEST_HISTOGRAMS:
            yield from self._histograms(family, lambda stats: stats.requests)

    def _speculation(self) -> Iterator[Metric]:
        for family in _SPECULATION:
            yield from self._numbers(CounterMetricFamily, family)
        yield from self._by_label(_PER_POSITION, "position", _accepted_by_position)

    def _faults(self) -> Iterator[Metric]:
        yield from self._by_label(_FAULTS, "event", lambda stats: stats.faults.by_event)
        for family in _FAULT_COUNTERS:
            yield from self._numbers(CounterMetricFamily, family, lambda stats: stats.faults)
        for family in _FAULT_HISTOGRAMS:
            yield from self._histograms(family, lambda stats: stats.faults)

    def _requests(self) -> Metric:
        names = ["method", "route", "status"]
        found = CounterMetricFamily("slipring:http_requests", "HTTP requests answered.", labels=names)
        for labels, value in self._counts.items():
            found.add_metric(labels, value)
        return found

    def _durations(self) -> Metric:
        text = "From the request's head to the answer's last byte."
        found = HistogramMetricFamily("slipring:http_request_duration_seconds", text, labels=["route"])
        for route, histogram in self._seconds.items():
            found.add_metric([route], _buckets(histogram), histogram.sum)
        return found

    def _family(
        self, kind: type[Any], family: Family, samples: Iterable[Sample], labels: Iterable[str] = ()
    ) -> Iterator[Metric]:
        """Under each of its names."""
        found = list(samples)
        for prefix in self._prefixes if family.in_vllm else (_OWN,):
            metric = kind(prefix + family.name, family.text, labels=["model_name", "engine", *labels])
            for engine, values, value in found:
                metric.add_metric([self._model, engine, *values], *value)
            yield metric

    def _numbers(self, kind: type[Any], family: Family, part: Part = lambda stats: stats) -> Iterator[Metric]:
        values = [(rank, getattr(part(stats), family.field)) for rank, stats in self._replicas]
        return self._family(kind, family, [Sample(rank, (), (value,)) for rank, value in values])

    def _histograms(self, family: Family, part: Part) -> Iterator[Metric]:
        found = [(rank, getattr(part(stats), family.field)) for rank, stats in self._replicas]
        samples = [Sample(rank, (), (_buckets(histogram), histogram.sum)) for rank, histogram in found]
        return self._family(HistogramMetricFamily, family, samples)

    def _by_label(
        self, family: Family, label: str, counts: Callable[[ReplicaStats], dict[str, int]]
    ) -> Iterator[Metric]:
        samples = [
            Sample(rank, (value,), (count,)) for rank, stats in self._replicas for value, count in counts(stats).items()
        ]
        return self._family(CounterMetricFamily, family, samples, (label,))

    def _info(self) -> Iterator[Metric]:
        settings = self._replicas[0][1].cache_config
        samples = [Sample(rank, tuple(stats.cache_config.values()), (1,)) for rank, stats in self._replicas]
        return self._family(GaugeMetricFamily, _CACHE_CONFIG, samples, settings)

    def _engine_wide(
        self,
        kind: type[Any],
        family: Family,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Iterator[Metric]:
        samples = [Sample(_ENGINE_WIDE, own, (value,)) for own, value in values.items()]
        return self._family(kind, family, samples, labels)


def _sources(stats: ReplicaStats) -> dict[str, int]:
    return {
        "local_compute": stats.prefix_cache_queries - stats.prefix_cache_hits,
        "local_cache_hit": stats.local_cache_hits,
        "external_kv_transfer": stats.external_cache_hits,
    }


def _accepted_by_position(stats: ReplicaStats) -> dict[str, int]:
    return {str(position): count for position, count in enumerate(stats.num_accepted_per_position or ())}


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus wants running sums; the engine keeps one count per bucket."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
