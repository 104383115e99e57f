"""Prompt tokens by what had their KV add up, and every source has its number from the beginning."""

from __future__ import annotations

from collections import Counter

from slipring.http.tier_metrics import cached_by_source, tier_counters
from slipring.runtime.tiers.jobs import StoreStats
from slipring.runtime.tiers.kv_tiers import KvTiersStats
from slipring.scheduler.offload.tiers import TierStats
from slipring.scheduler.offload.transfers import OffloadStats

NONE = {"device": 0, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}


def reading(**blocks: int) -> KvTiersStats:
    names = {"cpu": "cpu", "fs": "fs", "obj": "obj", "a": "p2p:a:1", "b": "p2p:b:1"}
    reused = Counter({names[name]: count for name, count in blocks.items()})
    return KvTiersStats(
        num_slots=8,
        num_occupied=4,
        num_pinned=0,
        page_bytes=100,
        block_size=16,
        device=OffloadStats(),
        tiers=TierStats(queries=20, reused_from=reused),
        stores={name: StoreStats() for name in ("fs", "obj", "p2p:a:1", "p2p:b:1")},
    )


def test_cached_tokens_by_source() -> None:
    assert cached_by_source(80, None) == NONE | {"device": 80}
    found = cached_by_source(200, reading(cpu=1, fs=2, obj=3, a=1, b=1))
    assert found == {"device": 72, "host": 16, "p2p": 32, "disk": 32, "external_unspecified": 48}
    assert cached_by_source(0, reading()) == NONE


def test_what_lies_outside_the_device_in_vllms_words() -> None:
    found = {each.name: each for each in tier_counters(reading(cpu=1, fs=2))}
    assert found["external_prefix_cache_queries"].values == {(): 320}
    assert found["external_prefix_cache_hits"].values == {(): 48}
    assert found["kv_tier_hit_tokens"].values[("fs",)] == 32
