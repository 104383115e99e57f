"""The KV tiers' part of the exposition: bytes and times by tier and direction, failures by kind, and what is full.

Slots that are occupied and slots that are pinned are told apart: a full, idle cache is full, and not at work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from slipring.runtime.tiers.kv_tiers import CPU, KvTiersStats


class Reading(NamedTuple):
    """One family: `values` by its labels' values; without labels one value under ()."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    in_vllm: bool = False


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
    hits: dict[tuple[str, ...], float] = {(name,): tiers.loaded_from.get(name, 0) * stats.block_size for name in names}
    text = "Prompt tokens whose KV came from a tier, by the tier that had it."
    yield Reading("kv_tier_hit_tokens", text, ("tier",), hits)
    evicted: dict[tuple[str, ...], float] = {(): tiers.evicted}
    yield Reading("kv_tier_evictions", "Blocks that the CPU tier gave up for others.", (), evicted)
    for name, direction in (("kv_offload_load_bytes", "load"), ("kv_offload_store_bytes", "store")):
        text = "KV moved between device and CPU tier."
        total: dict[tuple[str, ...], float] = {(): moved[CPU, direction]}
        yield Reading(name, text, (), total, in_vllm=True)
