"""Conversations with every kind of tier say what they say without: aborts, preemptions, drafts, depth 1 and 2.

Transfers are made slow (their acknowledgements reach the loop late, pages come late from slow tiers), so that aborts
and preemptions meet them half-way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from slipring.runtime.stats import Stats
from slipring.runtime.step_loop import StepLoop
from slipring.runtime.tiers.jobs import StoreThreads
from slipring.scheduler.offload.offload import Offload
from slipring.scheduler.request import Request
from slipring.scheduler.scheduler import Scheduler
from slipring.shm.control import BlocksMoved
from tests.e2e.tier_rig import (
    TINY_TOKENS,
    Talks,
    free_port,
    num_loaded,
    num_promoted,
    running,
    save_tiny_model,
    tiny,
    tiny_tiers,
)
from tests.runtime.tiers.test_object_store import S3Server

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Met:
    """What met a transfer half-way."""

    aborts: int = 0
    preemptions: int = 0


@pytest.fixture
def slow_transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Met]:
    """Acknowledgements up to 15 ms late and pages up to 5; counts what happens to requests and rows meanwhile."""
    chance, met = random.Random(0), Met()
    on_moved, load_page = StepLoop._on_moved, StoreThreads._load_page
    forget, preempt = Offload.forget, Scheduler._preempt

    def late(self: StepLoop, scheduler: Scheduler, moved: BlocksMoved) -> None:
        delay_s = chance.random() * 0.015
        asyncio.get_running_loop().call_later(delay_s, self._guarded, on_moved, self, scheduler, moved)

    def slow(self: StoreThreads, *arguments: Any) -> None:
        time.sleep(chance.random() * 0.005)
        load_page(self, *arguments)

    def forgetting(self: Offload, request: Request) -> None:
        prefetch = self.prefetch_of(request)
        met.aborts += prefetch is not None and (prefetch.promoting or prefetch.num_loading > 0)
        forget(self, request)

    def preempting(self: Scheduler, victim: Request) -> None:
        met.preemptions += self.offload.num_under_way > 0
        preempt(self, victim)

    monkeypatch.setattr(StepLoop, "_on_moved", late)
    monkeypatch.setattr(StoreThreads, "_load_page", slow)
    monkeypatch.setattr(Offload, "forget", forgetting)
    monkeypatch.setattr(Scheduler, "_preempt", preempting)
    yield met


def talk(talks: Talks, *settings: dict[str, Any]) -> tuple[list[list[int]], list[Stats]]:
    async def main() -> tuple[list[list[int]], list[Stats]]:
        async with running(*settings) as engines:
            return await talks.run(engines), [engine.stats() for engine in engines]

    return uvloop.run(main())


def few() -> Talks:
    return Talks(10, 3, TINY_TOKENS)


def many() -> Talks:
    return Talks(40, 5, TINY_TOKENS, max_tokens=16)


ROOMIER = {"max_model_len": 240, "num_gpu_blocks_override": 60}
"""Half a dozen short conversations fit, and outgrow the pool while they are answered."""


@pytest.fixture(scope="module")
def few_said(model: str) -> list[list[int]]:
    return talk(few(), tiny(model, async_scheduling=False, num_gpu_blocks_override=400))[0]


@pytest.fixture(scope="module")
def many_said(model: str) -> list[list[int]]:
    return talk(many(), tiny(model, async_scheduling=False, max_model_len=240, num_gpu_blocks_override=1600))[0]


def settings_of(kind: str, model: str, directory: Path, s3: S3Server | None, **common: Any) -> list[dict[str, Any]]:
    """One engine's settings for each that takes part."""
    if kind == "cpu":
        return [tiny(model, **common, **tiny_tiers(900))]
    if kind == "arc":
        return [tiny(model, **common, **tiny_tiers(120, eviction_policy="arc"))]
    if kind == "fs":
        tier = {"type": "fs", "root_dir": str(directory), "quota_bytes": 3 << 20}
        return [tiny(model, **common, **tiny_tiers(80, tier))]
    if kind == "obj":
        assert s3 is not None
        store = {"bucket": "pages", "endpoint_override": s3.url, "access_key_id": "a", "secret_access_key": "b"}
        return [tiny(model, **common, **tiny_tiers(80, {"type": "obj", "store_config": store}))]
    ports = [free_port(), free_port()]
    peers = [{"type": "p2p", "port": mine, "peers": [f"127.0.0.1:{other}"]} for mine, other in (ports, ports[::-1])]
    return [tiny(model, **common, **tiny_tiers(700, peer)) for peer in peers]


@pytest.mark.parametrize(
    ("kind", "depth_two", "drafts"), [("fs", True, None), ("p2p", False, None), ("arc", True, NGRAM)]
)
def test_conversations_say_the_same_with_tiers(
    tmp_path: Path, model: str, few_said: list[list[int]], slow_transfers: Met, kind: str, depth_two: bool, drafts: Any
) -> None:
    common = {"async_scheduling": depth_two, "speculative_config": drafts}
    answers, stats = talk(few(), *settings_of(kind, model, tmp_path, None, **common))
    assert answers == few_said
    assert num_loaded(stats) > 0
    assert kind == "arc" or num_promoted(stats) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "depth", "drafts"),
    [
        ("cpu", 2, ""),
        ("cpu", 1, "ngram"),
        ("arc", 2, "eagle"),
        ("arc", 1, ""),
        ("fs", 2, "ngram"),
        ("fs", 1, "eagle"),
        ("obj", 2, ""),
        ("obj", 1, "ngram"),
        ("p2p", 2, "ngram"),
        ("p2p", 1, "eagle"),
    ],
)
def test_200_requests_say_the_same_with_every_tier(
    tmp_path: Path,
    model: str,
    many_said: list[list[int]],
    slow_transfers: Met,
    kind: str,
    depth: int,
    drafts: str,
) -> None:
    from tests.e2e.eagle_rig import random_head

    speculation = {"": None, "ngram": NGRAM}.get(drafts) or (drafts == "eagle" and random_head(model, tmp_path))
    common = {"async_scheduling": depth == 2, "speculative_config": speculation or None, **ROOMIER}
    s3 = S3Server() if kind == "obj" else None
    try:
        answers, stats = talk(many(), *settings_of(kind, model, tmp_path / "kv", s3, **common))
    finally:
        if s3 is not None:
            s3.close()
    assert len(answers) == 200 and answers == many_said
    assert num_loaded(stats) > 0 and (kind in ("cpu", "arc") or num_promoted(stats) > 0)
    assert sum(each.num_preemptions for each in stats) > 0
    assert slow_transfers.aborts > 0 and slow_transfers.preemptions > 0
    if drafts:
        assert sum(sum(each.num_accepted_per_position or ()) for each in stats) > 0
