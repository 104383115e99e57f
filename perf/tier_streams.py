"""What transfers cost the streams beside them: gaps between tokens, with everything in the device's pool, and with
prefixes that must be loaded each time while what is new is stored.

The engines take turns, a stretch each, as in `tier_talks`; the streams of a stretch are the same for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from typing import Any

import numpy as np

from perf.figure import in_turns, percentile
from perf.tier_engine import BLOCK, TOKENS, Engine, moved_mb, say, settled, started, tiers
from tests.e2e.tier_rig import ask, finished

NUM_STREAMS, STREAM_TOKENS = 4, 96
NUM_PREFIXES, PREFIX_BLOCKS, NEW_BLOCKS = 6, 30, 2
_POOL_BLOCKS = 130
"""Of an engine with tiers: the streams, and not nearly all of the prefixes."""
_PAUSE_S = 0.05
"""Between two conversations' turns."""


class Streams:
    def __init__(self, num_stretches: int, seed: int) -> None:
        self._num_stretches = num_stretches
        self._chance = np.random.default_rng(seed)
        self._prefixes = self._prompts(NUM_PREFIXES, PREFIX_BLOCKS * BLOCK)

    def _prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        return self._chance.integers(*TOKENS, (count, num_tokens)).tolist()

    async def run(self) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
        """(gaps by row, rows)."""
        async with contextlib.AsyncExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            pool = {"num_gpu_blocks_override": _POOL_BLOCKS}
            kinds = {
                "roomy": {"num_gpu_blocks_override": 2000},
                "cpu": pool | tiers(1000),
                "fs": pool | tiers(_POOL_BLOCKS, directory),
            }
            engines = {}
            for name, settings in kinds.items():
                engines[name] = engine = await started(**settings)
                stack.push_async_callback(engine.stop)
                for number, prefix in enumerate(self._prefixes):
                    await finished(ask(engine, f"first-{number}", prefix, 1))
                await settled(engine)
                say(f"an engine for streams beside {name} is ready")
            gaps: dict[str, list[float]] = {name: [] for name in kinds}
            turns = dict.fromkeys(kinds, 0)
            for stretch in range(self._num_stretches):
                streams = self._prompts(NUM_STREAMS, 2 * BLOCK)
                questions = self._prompts(200, NEW_BLOCKS * BLOCK)
                for name in in_turns(list(kinds), stretch):
                    found, count = await self._stretch(engines[name], stretch, streams, questions)
                    gaps[name] += found
                    turns[name] += count
                say(f"stretch {stretch + 1} of {self._num_stretches}")
            return gaps, [_row(name, gaps[name], turns[name], engines[name]) for name in kinds]

    async def _stretch(
        self, engine: Engine, stretch: int, prompts: list[list[int]], questions: list[list[int]]
    ) -> tuple[list[float], int]:
        """(the streams' gaps, how many turns came and went beside them)."""
        streams = [ask(engine, f"{stretch}-stream-{i}", prompt, STREAM_TOKENS) for i, prompt in enumerate(prompts)]
        while not all(stream.times for stream in streams):
            await asyncio.sleep(0.01)
        number = 0
        while not all(stream.done.is_set() for stream in streams):
            prompt = self._prefixes[number % NUM_PREFIXES] + questions[number % len(questions)]
            await finished(ask(engine, f"{stretch}-turn-{number}", prompt, 1))
            await asyncio.sleep(_PAUSE_S)
            number += 1
        await settled(engine)
        return [gap for stream in streams for gap in np.diff(stream.times).tolist()], number


def _row(name: str, gaps: list[float], num_turns: int, engine: Engine) -> dict[str, Any]:
    middle, tail = (round(percentile(gaps, share) * 1e3, 1) for share in (50, 99))
    row = {"tier": f"streams beside {name}", "itl_p50_ms": middle, "itl_p99_ms": tail, "turns": num_turns}
    return row | moved_mb(engine)
