"""`Stats`: a snapshot of what an engine counts, by replica; `http/` turns it into an exposition.

A snapshot is a copy: it may be read in another thread while the loop counts on.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from slipring.runtime.config import ResolvedConfig
from slipring.runtime.metrics import FaultCounts, Histogram, RequestHistograms
from slipring.runtime.tiers.kv_tiers import KvTiersStats

if TYPE_CHECKING:
    from slipring.runtime.replica import Replica


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's part. Times are seconds, prefix-cache counts are tokens."""

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
    external_cache_hits: int = 0
    """Those of them that a KV tier had, and not the device."""
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    num_steps: int
    num_drafts: int = 0
    """Times that drafts were verified for a row; with speculation only, as are the next two."""
    num_draft_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] | None = None
    """Accepted drafts by their place in the chain; None without speculation."""
    finished: dict[str, int]
    ttft_s: Histogram
    itl_s: Histogram
    requests: RequestHistograms
    cache_config: dict[str, str]
    """Settings of the KV cache, for people and dashboards."""
    faults: FaultCounts = msgspec.field(default_factory=FaultCounts.empty)

    @property
    def local_cache_hits(self) -> int:
        """Those that the device had."""
        return self.prefix_cache_hits - self.external_cache_hits

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts."""
        return sum(self.num_accepted_per_position or ())


class _Sum:
    """Of `Stats`: the sum of the field of this name over all replicas."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Stats, owner: type) -> int:
        return sum(getattr(each, self._name) for each in stats.by_rank)


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    by_rank: tuple[ReplicaStats, ...]
    num_rejected: int
    """Requests refused because the queue was full: no replica ever had them."""
    tiers: KvTiersStats | None = None
    """All replicas' together; None without tiers."""
    num_in_state: dict[str, int] = {}
    """Replicas by state."""

    num_running = _Sum()
    num_waiting = _Sum()
    num_blocks = _Sum()
    num_free_blocks = _Sum()
    prefix_cache_queries = _Sum()
    prefix_cache_hits = _Sum()
    prompt_tokens = _Sum()
    generation_tokens = _Sum()
    num_preemptions = _Sum()
    num_steps = _Sum()
    num_drafts = _Sum()
    num_draft_tokens = _Sum()
    num_accepted_tokens = _Sum()

    @property
    def finished(self) -> dict[str, int]:
        """Completions by how they ended."""
        reasons = self.by_rank[0].finished
        return {reason: sum(each.finished[reason] for each in self.by_rank) for reason in reasons}

    @property
    def num_accepted_per_position(self) -> tuple[int, ...] | None:
        found = [each.num_accepted_per_position for each in self.by_rank]
        chains = [chain for chain in found if chain is not None]
        # A replica that has not served yet has counted nothing.
        return tuple(map(sum, zip_longest(*chains, fillvalue=0))) if chains else None


def stats_of(replica: Replica, config: ResolvedConfig) -> ReplicaStats:
    metrics, counters = replica.metrics, replica.counters
    num_running, num_waiting = replica.load
    pool = replica.scheduler.pool if replica.scheduler is not None else None
    num_blocks, num_free = (0, 0) if pool is None else (pool.num_blocks, pool.num_free)
    return ReplicaStats(
        num_running=num_running,
        num_waiting=num_waiting,
        kv_cache_usage=1.0 - num_free / num_blocks if num_blocks else 0.0,
        num_blocks=num_blocks,
        num_free_blocks=num_free,
        num_cached_blocks=0 if pool is None else pool.num_cached,
        prefix_cache_queries=counters.prefix_queries,
        prefix_cache_hits=counters.prefix_hits,
        external_cache_hits=counters.external_hits,
        prompt_tokens=metrics.prompt_tokens,
        generation_tokens=metrics.generation_tokens,
        num_preemptions=counters.num_preemptions,
        num_steps=counters.num_steps,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_per_position=tuple(counters.num_accepted_per_position) if config.max_draft else None,
        finished=metrics.finished.copy(),
        ttft_s=metrics.ttft_s.copy(),
        itl_s=metrics.itl_s.copy(),
        requests=metrics.requests.copy(),
        cache_config=_cache_config(config, num_blocks),
        faults=metrics.faults.copy(),
    )


def _cache_config(config: ResolvedConfig, num_blocks: int) -> dict[str, str]:
    user = config.user
    return {
        "block_size": str(user.block_size),
        "num_gpu_blocks": str(num_blocks),
        "kv_cache_size_tokens": str(num_blocks * user.block_size),
        "enable_prefix_caching": str(user.enable_prefix_caching),
        "cache_dtype": config.dtype,
    }
