"""The KV tiers' part of the exposition: bytes and times by tier and direction, failures by kind, and what is full.

Slots that are occupied and slots that are pinned are told apart: a full, idle cache is full, and not at work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from slipring.runtime.tiers.address import PEER_PREFIX
from slipring.runtime.tiers.kv_tiers import CPU, KvTiersStats


class Reading(NamedTuple):
    """One family: `values` by its labels' values; without labels one value under ()."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    in_vllm: bool = False


def cached_by_source(num_cached: int, stats: KvTiersStats | None) -> dict[str, int]:
    """`num_cached` prompt tokens that were not computed, by what had their KV, in vLLM's words."""
    found: dict[str, int] = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
    if stats is not None:
        for tier, count in stats.tiers.reused_from.items():
            found[_source(tier)] += count * stats.block_size
    found["device"] = num_cached - sum(found.values())
    return found


def _source(tier: str) -> str:
    if tier.startswith(PEER_PREFIX):
        return "p2p"
    kind = tier.partition("-")[0]  # a second directory is fs-2
    return {CPU: "host", "fs": "disk"}.get(kind, "external_unspecified")


def tier_gauges(stats: KvTiersStats) -> Iterator[Reading]:
    slots: dict[tuple[str, ...], float] = {
        ("occupied",): stats.num_occupied,
        ("pinned",): stats.num_pinned,
        ("all",): stats.num_slots,
    }
    yield Reading("kv_tier_slots", "Blocks of the CPU tier: occupied, pinned by transfers, all.", ("state",), slots)
    usage: dict[tuple[str, ...], float] = {(): stats.num_occupied / stats.num_slots}
    text = "Share of the CPU tier's slots that hold something; 1 is all."
    yield Reading("kv_offload_cpu_cache_usage_perc", text, (), usage, in_vllm=True)


def tier_counters(stats: KvTiersStats) -> Iterator[Reading]:
    device, page = stats.device, stats.page_bytes
    moved: dict[tuple[str, ...], float] = {
        (CPU, "load"): device.loaded_blocks * page,
        (CPU, "store"): device.stored_blocks * page,
    }
    seconds: dict[tuple[str, ...], float] = {
        (CPU, "load"): device.load_seconds,
        (CPU, "store"): device.store_seconds,
    }
    failed: dict[tuple[str, ...], float] = {(CPU, "failed"): device.load_failures}
    skipped: dict[tuple[str, ...], float] = {(CPU,): device.stores_skipped + stats.tiers.stores_skipped}
    for name, store in stats.stores.items():
        moved |= {(name, "load"): store.loaded_bytes, (name, "store"): store.stored_bytes}
        seconds |= {(name, "load"): store.load_seconds, (name, "store"): store.store_seconds}
        failed |= {(name, kind): getattr(store, kind) for kind in ("missing", "corrupt", "failed", "late")}
        skipped[name,] = store.skipped
    yield Reading("kv_tier_bytes", "KV moved; `cpu` is between device and CPU tier.", ("tier", "direction"), moved)
    yield Reading("kv_tier_seconds", "What that took, summed over threads.", ("tier", "direction"), seconds)
    yield Reading("kv_tier_failures", "Blocks that could not be had, and were recomputed.", ("tier", "kind"), failed)
    yield Reading("kv_tier_stores_skipped", "Blocks not stored, for want of room or time.", ("tier",), skipped)
    tiers = stats.tiers
    lookups: dict[tuple[str, ...], float] = {
        ("queries",): tiers.queries,
        ("hits",): tiers.hits,
        ("promoted",): tiers.promoted,
    }
    text = "Blocks asked for behind the device, found in the CPU tier, brought up from slower ones."
    yield Reading("kv_tier_lookups", text, ("result",), lookups)
    names = (CPU, *stats.stores)
    hits: dict[tuple[str, ...], float] = {(name,): tiers.reused_from[name] * stats.block_size for name in names}
    text = "Prompt tokens whose KV came from a tier, by the tier that had it."
    yield Reading("kv_tier_hit_tokens", text, ("tier",), hits)
    for name, count in (("queries", tiers.queries * stats.block_size), ("hits", sum(hits.values()))):
        text = "Prompt tokens asked for behind the device." if name == "queries" else "Those whose KV came from a tier."
        yield Reading(f"external_prefix_cache_{name}", text, (), {(): count}, in_vllm=True)
    evicted: dict[tuple[str, ...], float] = {(): tiers.evicted}
    yield Reading("kv_tier_evictions", "Blocks that the CPU tier gave up for others.", (), evicted)
    for name, direction in (("kv_offload_load_bytes", "load"), ("kv_offload_store_bytes", "store")):
        text = "KV moved between device and CPU tier."
        total: dict[tuple[str, ...], float] = {(): moved[CPU, direction]}
        yield Reading(name, text, (), total, in_vllm=True)
