"""A directory of pages outlives the configuration of the model that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import uvloop

from tests.e2e.tier_rig import TINY_TOKENS, ask, finished, running, save_tiny_model, tiny, tiny_tiers
from tests.waits import settled

PROMPT = [TINY_TOKENS[7 * number % 200] for number in range(61)]


@pytest.mark.slow
def test_another_rotation_does_not_load_the_pages_of_the_first(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    settings = tiny(model, **tiny_tiers(200, {"type": "fs", "root_dir": str(tmp_path / "kv")}))

    async def num_cached() -> int:
        async with running(settings) as (engine,):
            answer = ask(engine, "prompt", PROMPT)
            await finished(answer)
            await settled(engine)
            return answer.num_cached

    assert uvloop.run(num_cached()) == 0
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 500_000.0}))
    assert uvloop.run(num_cached()) == 0
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 2 * ((len(PROMPT) + 3) // 4), "both have stored their own"
