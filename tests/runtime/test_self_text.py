"""A model that writes what it is trained on: as much as was asked for, and progress that is true."""

from __future__ import annotations

from pathlib import Path

import uvloop

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.self_text import SelfText, Writer
from tests.small_model import save_small_model

GOAL = 500


def test_it_writes_what_was_asked_for_and_says_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    async def main() -> SelfText:
        engine = Engine(
            EngineConfig(model=save_small_model(tmp_path), max_num_seqs=64, max_model_len=512, cpu_threads=1)
        )
        await engine.start()
        try:
            return await Writer(engine, seed=1).write(GOAL, lambda done, total: told.append((done, total)))
        finally:
            await engine.stop()

    found = uvloop.run(main())
    answered = sum(len(text) - given for text, given in zip(found.written, found.prompts, strict=True))
    assert GOAL <= found.num_tokens == answered < GOAL + 32
    done = [each for each, _ in told]
    assert done == sorted(done) and done[-1] == GOAL and {total for _, total in told} == {GOAL}
    assert sum(each < GOAL for each in done) > len(found.written), "it moves while texts are being written"
