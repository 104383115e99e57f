"""Waiting for an engine to come to rest."""

from __future__ import annotations

import asyncio
import time

from slipring.runtime.engine import Engine


async def settled(engine: Engine) -> None:
    """Wait until no request is left, and every block and every slot of the tiers is free of users."""
    deadline = time.monotonic() + 30
    while True:
        stats = engine.stats()
        pinned = stats.tiers.num_pinned if stats.tiers is not None else 0
        held = stats.num_blocks - stats.num_free_blocks
        if not (stats.num_running or stats.num_waiting or held or pinned):
            return
        assert time.monotonic() < deadline, f"{held} blocks, {pinned} slots are still held: {stats}"
        await asyncio.sleep(0.005)
