"""What the parts of the tiers figure share: engines on the real model. Answers are those of the tests."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from tests.e2e import tier_rig

BLOCK = 16
BLOCK_BYTES = BLOCK // tier_rig.BLOCK * tier_rig.BLOCK_BYTES
TOKENS = (100, 40_000)


async def started(**settings: Any) -> Engine:
    engine = Engine(EngineConfig(model="smollm2", dtype="float32", block_size=BLOCK, max_num_seqs=16, **settings))
    await engine.start()
    return engine


def tiers(num_blocks: int, directory: str | None = None) -> dict[str, str]:
    """Settings: a CPU tier of so many blocks, and perhaps a directory behind it."""
    slow = [] if directory is None else [{"type": "fs", "root_dir": directory}]
    return tier_rig.tiers(num_blocks, *slow, block_bytes=BLOCK_BYTES)


async def settled(engine: Engine) -> None:
    """Wait until nothing is moved any more, so that it does not burden whoever is measured next."""
    async with asyncio.timeout(120):
        while (stats := engine.stats().tiers) is not None and stats.num_pinned:
            await asyncio.sleep(0.05)


def moved_mb(engine: Engine) -> dict[str, int]:
    """What has gone between the device and the CPU tier so far."""
    stats = engine.stats().tiers
    if stats is None:
        return {"loaded_mb": 0, "stored_mb": 0}
    return {
        "loaded_mb": stats.device.loaded_blocks * stats.page_bytes // 10**6,
        "stored_mb": stats.device.stored_blocks * stats.page_bytes // 10**6,
    }


def say(words: str) -> None:
    """Progress, beside the output."""
    print(words, file=sys.stderr, flush=True)
