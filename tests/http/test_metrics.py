"""/metrics parses, adds up, and has bounded labels."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipring.http.api import Api
from slipring.runtime.metrics import Metrics
from tests.http.calls import call, make_api
from tests.http.engine_double import EngineDouble


def scrape(api: Api) -> dict[str, list[Any]]:
    response = call(api, "GET", "/metrics")
    assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert isinstance(response.body, bytes)
    families = list(text_string_to_metric_families(response.body.decode()))
    found = {family.name: family.samples for family in families}
    assert len(found) == len(families), "no family comes twice"
    return found


def test_engine_counters_under_vllms_names() -> None:
    engine = EngineDouble()
    engine.metrics[0].finished["stop"] = 3
    families = scrape(make_api(engine))
    running = families["vllm:num_requests_running"][0]
    assert running.labels == {"model_name": "m", "engine": "0"}
    assert families["vllm:kv_cache_usage_perc"][0].value == 0.5
    assert families["vllm:prompt_tokens"][0].value == 7
    by_reason = {sample.labels["finished_reason"]: sample.value for sample in families["vllm:request_success"]}
    assert by_reason == {"stop": 3, "length": 0, "abort": 0, "error": 0}


def test_each_replica_is_an_engine_and_engines_add_up() -> None:
    engine = EngineDouble()
    engine.metrics.append(Metrics())
    for rank, metrics in enumerate(engine.metrics):
        metrics.finished["stop"] = 3 + rank
        metrics.faults.by_event["hang"] = 1 + rank
        metrics.ttft_s.observe(0.01 * (1 + rank))
        metrics.requests.e2e_s.observe(1.0)
    families = scrape(make_api(engine))

    def by_engine(name: str, end: str = "", **labels: str) -> dict[str, float]:
        family = next(families[name.removesuffix(cut)] for cut in (end, "") if name.removesuffix(cut) in families)
        found = [each for each in family if each.name == name and labels.items() <= each.labels.items()]
        return {sample.labels["engine"]: sample.value for sample in found}

    for prefix in ("vllm:", "slipring:"):
        assert by_engine(prefix + "num_requests_waiting") == {"0": 0, "1": 1}
        assert by_engine(prefix + "prompt_tokens_total", "_total") == {"0": 7, "1": 8}
        assert by_engine(prefix + "request_success_total", "_total", finished_reason="stop") == {"0": 3, "1": 4}
        assert by_engine(prefix + "time_to_first_token_seconds_sum", "_sum") == {"0": 0.01, "1": 0.02}
        assert by_engine(prefix + "e2e_request_latency_seconds_count", "_count") == {"0": 1, "1": 1}
        assert by_engine(prefix + "cache_config_info", num_gpu_blocks="11") == {"1": 1}
        sources = {"local_compute": {"0": 1, "1": 2}, "local_cache_hit": {"0": 3, "1": 2}}
        for source, counts in (sources | {"external_kv_transfer": {"0": 0, "1": 1}}).items():
            assert by_engine(prefix + "prompt_tokens_by_source_total", "_total", source=source) == counts
        assert by_engine(prefix + "prefix_cache_hits_total", "_total") == sources["local_cache_hit"]
        assert by_engine(prefix + "prompt_tokens_cached_total", "_total") == {"0": 3, "1": 3}
        assert by_engine(prefix + "spec_decode_num_draft_tokens_total", "_total") == {"0": 0, "1": 2}
        accepted = by_engine(prefix + "spec_decode_num_accepted_tokens_per_pos_total", "_total", position="0")
        assert accepted == {"1": 2}
    assert by_engine("slipring:num_blocks") == {"0": 10, "1": 11}
    assert by_engine("slipring:faults_total", "_total", event="hang") == {"0": 1, "1": 2}
    assert by_engine("slipring:rejected_requests_total", "_total") == {"0": 4}, "no replica ever had them"
    whole = engine.stats()
    assert (whole.num_waiting, whole.prompt_tokens, whole.num_blocks) == (1, 15, 21)
    assert whole.finished["stop"] == 7 and whole.num_accepted_per_position == (2,)


def test_histograms_are_cumulative() -> None:
    engine = EngineDouble()
    for seconds in (0.0001, 0.0001, 0.03, 1e6):
        engine.metrics[0].ttft_s.observe(seconds)
    samples = scrape(make_api(engine))["vllm:time_to_first_token_seconds"]
    buckets = [s for s in samples if s.name.endswith("_bucket")]
    counts = [s.value for s in buckets]
    assert counts == sorted(counts) and counts[0] == 2 and counts[-1] == 4
    assert buckets[-1].labels["le"] == "+Inf"
    assert next(s.value for s in samples if s.name.endswith("_count")) == 4
    assert next(s.value for s in samples if s.name.endswith("_sum")) > 1e6 - 1


def test_requests_are_counted_by_route_never_by_path() -> None:
    api = make_api()
    for method, path in (("GET", "/health"), ("GET", "/v1/models/a"), ("GET", "/v1/models/b"), ("BREW", "/x" * 99)):
        call(api, method, path)
    samples = scrape(api)["slipring:http_requests"]
    counts = {tuple(s.labels.values()): s.value for s in samples if s.name.endswith("_total")}
    assert counts == {
        ("GET", "/health", "200"): 1, ("GET", "/v1/models/{id}", "404"): 2, ("other", "unmatched", "404"): 1,
    }  # fmt: skip


def test_metrics_while_starting() -> None:
    api = make_api()
    api.engine = None
    assert "vllm:num_requests_running" not in scrape(api)


VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens", "generation_tokens",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_params_max_tokens", "request_params_n", "cache_config_info", "prompt_tokens_by_source",
    "prompt_tokens_cached_by_source",
}  # fmt: skip
"""What a dashboard made for vLLM asks for."""


@pytest.mark.parametrize(("names", "present", "absent"), [
    ("both", {"slipring", "vllm"}, set()), ("vllm", {"vllm"}, {"slipring"}), ("slipring", {"slipring"}, {"vllm"}),
])  # fmt: skip
def test_whose_names(names: str, present: set[str], absent: set[str]) -> None:
    found = set(scrape(make_api(metrics_names=names)))
    for prefix in present:
        assert {f"{prefix}:{name}" for name in VLLM} <= found
    for prefix in absent:
        assert not {f"{prefix}:{name}" for name in VLLM} & found
    assert "slipring:num_free_blocks" in found, "what vLLM has not is ours in any case"


def test_a_tenth_of_a_millisecond_is_resolved() -> None:
    for histogram in (EngineDouble().metrics[0].itl_s, EngineDouble().metrics[0].ttft_s):
        assert histogram.bounds[:2] == (0.0001, 0.0002)
