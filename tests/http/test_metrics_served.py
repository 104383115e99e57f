"""What a real server counts: the sums of what it answered, and never less than a moment ago."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import alive, server_at

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ONE = {"prompt": "Count with me:", "temperature": 0, "ignore_eos": True}


def scrape(url: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(server_at(url).get("/metrics")):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a series comes twice"
            found[key] = sample.value
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for (known, given), value in samples.items() if known == name and labels.items() <= set(given))


def growing(samples: Samples) -> Iterator[tuple[Any, float]]:
    ends = ("_total", "_bucket", "_count", "_sum")
    return ((key, value) for key, value in samples.items() if key[0].endswith(ends))


def test_totals_are_the_sums_of_the_answers(server: str) -> None:
    at, before = server_at(server), scrape(server)
    bodies = [
        {**ONE, "max_tokens": 3}, {**ONE, "max_tokens": 2, "n": 3}, {**ONE, "max_tokens": 40, "stop": [" "]},
        {**ONE, "prompt": ["a", "b"], "max_tokens": 1},
    ]  # fmt: skip
    usages = [at.post("/v1/completions", body)["usage"] for body in bodies]
    refused = requests.post(f"{server}/v1/completions", json={**ONE, "n": 0}, timeout=30)
    assert refused.status_code == 400
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    for prefix in ("vllm", "slipring"):
        assert grown(f"{prefix}:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
        assert grown(f"{prefix}:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
        assert grown(f"{prefix}:request_success_total") == 7, "a refusal is no success"
        assert grown(f"{prefix}:request_success_total", finished_reason="stop") == 1
        assert grown(f"{prefix}:request_params_n_count") == 5
        for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_decode_time_seconds"):
            assert grown(f"{prefix}:{name}_count") == 7
    # Seven completions: 3 + 6 + those until a blank + 2 tokens, the first of each is a TTFT.
    gaps = grown("vllm:inter_token_latency_seconds_count")
    assert gaps == grown("vllm:generation_tokens_total") - grown("vllm:time_to_first_token_seconds_count")
    # What a server has is told: parts of a request's life add up to the whole.
    parts = [grown(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts) and sum(parts) <= grown("vllm:e2e_request_latency_seconds_sum") + 1e-6
    for (name, labels), value in after.items():
        assert math.isfinite(value)
        if name.endswith("_count"):
            rest = tuple(sorted([*labels, ("le", "+Inf")]))
            assert after[name.removesuffix("_count") + "_bucket", rest] == value


def test_labels_are_never_a_clients_words(server: str) -> None:
    def post(i: int) -> None:
        headers = {"x-request-id": f"id-{i}"}
        body = {**ONE, "model": f"model-{i}", "user": f"user-{i}"}
        assert requests.post(f"{server}/v1/completions", json=body, headers=headers, timeout=30).status_code == 404
        assert requests.get(f"{server}/v1/models/other-{i}", timeout=30).status_code == 404
        assert requests.get(f"{server}/odd-{i}", timeout=30).status_code == 404

    post(0)
    before = set(scrape(server))
    for i in range(1, 30):
        post(i)
    assert set(scrape(server)) == before


def test_counters_never_go_down(server: str) -> None:
    """While answers end in every way: at once, at a stop, by a client who leaves, by an operator."""
    done = threading.Event()

    def traffic(seed: int) -> None:
        i = 0
        while not done.is_set():
            i += 1
            varied = {"prompt": f"Round {i % 3}. " * 9, "max_tokens": 20, "n": 1 + i % 2, "seed": seed}
            body = {**ONE, **varied, "stream": True}
            with requests.post(f"{server}/v1/completions", json=body, stream=True, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                if i % 3:  # else the client leaves
                    assert list(lines)
            if i % 4 == 0:
                requests.post(f"{server}/abort_requests", timeout=30)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(traffic, seed) for seed in range(3)]
        last: dict[Any, float] = {}
        for _ in range(12):
            now = dict(growing(scrape(server)))
            assert not [key for key, value in last.items() if now[key] < value]
            last = now
            done.wait(0.1)
        done.set()
        for task in running:
            task.result()
    alive(server)
