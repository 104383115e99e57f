"""What a KV tier loads is nothing that a draft model has seen, whatever it knew of the same blocks before."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import uvloop

from slipring.runtime.engine import Engine
from tests.e2e.tier_rig import (
    TINY_BLOCK_BYTES,
    TINY_TOKENS,
    ask,
    finished,
    num_loaded,
    running,
    save_tiny_model,
    tiers,
    tiny,
)
from tests.waits import settled

NUM_IDLE = 10
PROMPT = [TINY_TOKENS[number * 7 % 200] for number in range(61)]
CROWD = [[TINY_TOKENS[(50 * other + number * 11) % 199] for number in range(60)] for other in range(4)]


@pytest.mark.slow
def test_drafts_are_as_right_after_a_load_as_before(tmp_path: Path) -> None:
    """The draft model is the target without its idle layers: all it says is right, if its state is."""
    small, large = save_tiny_model(tmp_path / "small"), save_tiny_model(tmp_path / "large", NUM_IDLE)
    drafts = {"method": "draft_model", "model": small, "num_speculative_tokens": 3}
    block_bytes = TINY_BLOCK_BYTES * (2 + NUM_IDLE) // 2
    settings = tiny(large, speculative_config=json.dumps(drafts), **tiers(200, block_bytes=block_bytes))

    async def share(engine: Engine, name: str, prompt: list[int]) -> tuple[float, list[int]]:
        before = engine.stats()
        tokens = await finished(ask(engine, name, prompt, 25))
        stats = engine.stats()
        drafted = stats.num_draft_tokens - before.num_draft_tokens
        assert drafted > 6
        return (stats.num_accepted_tokens - before.num_accepted_tokens) / drafted, tokens

    async def main() -> None:
        async with running(settings) as (engine,):
            first, tokens = await share(engine, "first", PROMPT)
            for number, other in enumerate(CROWD):
                await share(engine, f"crowd-{number}", other)
            await settled(engine)
            await asyncio.sleep(0.3)  # what is handed down has arrived
            again, same = await share(engine, "again", PROMPT)
            assert num_loaded([engine.stats()]) >= 10
            assert tokens == same
            assert first > 0.9 and again > 0.9, (first, again)

    uvloop.run(main())
