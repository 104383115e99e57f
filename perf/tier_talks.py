"""Conversations that the device's pool cannot hold: time to first token by what keeps their KV.

The engines stand side by side and take turns, a round of the conversations each, so that what else the machine does
hits all of them. Within a round one conversation follows the other, so a time to first token is work and not queueing.

What is new in a turn must be computed whatever the tiers do: `device`, whose pool holds everything, says what is left
then. Recomputation, and that, are the same whoever asks, so they are measured for every fourth conversation only.
While they are short the pool would hold these, so what recomputes has no prefix cache: of all 64 it would find none.

In the second half of a round the files are no longer in the page cache: `fs` is the first half, `fs cold` the second.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perf.figure import in_turns, percentile
from perf.tier_engine import BLOCK, TOKENS, Engine, say, settled, started, tiers
from tests.e2e.tier_rig import ask, finished

NUM_TALKS, NUM_TURNS = 64, 6
HELD_SHARE = 1 / 8
"""Of the conversations, what the device's pool holds."""
SAMPLED = 4
"""Every so many conversations are recomputed."""
OPENING_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 160, 48, 8
MOST_DIFFERENT = 0.02
"""Of the answers: near ties of the two best tokens may fall either way, where a prompt is computed in other pieces."""
_BLOCKS_PER_TALK = (OPENING_TOKENS + NUM_TURNS * (QUESTION_TOKENS + ANSWER_TOKENS)) // BLOCK


@dataclass
class Kind:
    """One way to keep KV, and what was measured of it."""

    name: str
    settings: dict[str, Any]
    step: int = 1
    """Every so many conversations are asked."""
    directory: str | None = None
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    """From the second turn on, by the name of the row."""


class Talks:
    def __init__(self, num_talks: int, seed: int) -> None:
        self.num_talks = num_talks
        self._chance = np.random.default_rng(seed)
        self._history: list[list[int]] = [[] for _ in range(num_talks)]
        self._answers: dict[tuple[int, int], list[int]] = {}
        """By turn and conversation: of whoever was asked first."""
        self._num_compared = self._num_different = 0

    async def run(self) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
        """(times to first token by row, rows)."""
        async with contextlib.AsyncExitStack() as stack:
            kinds = kinds_of(self.num_talks, stack.enter_context(tempfile.TemporaryDirectory()))
            engines: dict[str, Engine] = {}
            for kind in kinds:
                engines[kind.name] = engine = await started(**kind.settings)
                stack.push_async_callback(engine.stop)
                say(f"an engine for conversations, {kind.name}, is ready")
            for turn in range(NUM_TURNS):
                self._ask_something_new(turn)
                for kind in in_turns(kinds, turn):
                    began = time.monotonic()
                    await self._round(engines[kind.name], kind, turn)
                    say(f"turn {turn + 1} of {NUM_TURNS}, {kind.name}: {time.monotonic() - began:.0f} s")
                for talk, history in enumerate(self._history):
                    history += self._answers[turn, talk]
            assert self._num_different <= MOST_DIFFERENT * self._num_compared, (
                f"{self._num_different} of {self._num_compared} answers differ between the engines"
            )
            return self._told(kinds, engines)

    def _ask_something_new(self, turn: int) -> None:
        for history in self._history:
            num_new = QUESTION_TOKENS if turn else OPENING_TOKENS + QUESTION_TOKENS
            history += self._chance.integers(*TOKENS, num_new).tolist()

    async def _round(self, engine: Engine, kind: Kind, turn: int) -> None:
        row = kind.name
        for talk in range(0, self.num_talks, kind.step):
            if kind.directory is not None and talk == self.num_talks // 2:
                await settled(engine)
                _forget_cached(Path(kind.directory))
                row = f"{kind.name} cold"
            answer = ask(engine, f"{turn}-{talk}", self._history[talk], ANSWER_TOKENS)
            await finished(answer)
            if turn:
                kind.ttft_s.setdefault(row, []).append(answer.ttft_s)
            first = self._answers.setdefault((turn, talk), answer.tokens)
            self._num_compared += 1
            self._num_different += first != answer.tokens
        await settled(engine)

    def _told(
        self, kinds: list[Kind], engines: dict[str, Engine]
    ) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
        rows, times = [], {}
        for kind in kinds:
            stats = engines[kind.name].stats()
            for row, samples in kind.ttft_s.items():
                times[row] = samples
                rows.append(
                    {
                        "tier": row,
                        "ttft_p50_ms": round(percentile(samples, 50) * 1e3, 1),
                        "ttft_p95_ms": round(percentile(samples, 95) * 1e3, 1),
                        "hit_share": round(stats.prefix_cache_hits / stats.prompt_tokens, 3),
                    }
                )
        return times, rows


def kinds_of(num_talks: int, directory: str) -> list[Kind]:
    """The file tier's CPU tier holds as much as the device, so its pages come from files."""
    every, held = (num_talks + 2) * _BLOCKS_PER_TALK, int(num_talks * HELD_SHARE) * _BLOCKS_PER_TALK
    pool = {"num_gpu_blocks_override": held}
    return [
        Kind("cpu", pool | tiers(every)),
        Kind("fs", pool | tiers(held, directory), directory=directory),
        Kind("recomputed", pool | {"enable_prefix_caching": False}, SAMPLED),
        Kind("device", {"num_gpu_blocks_override": every // SAMPLED + _BLOCKS_PER_TALK}, SAMPLED),
    ]


def _forget_cached(directory: Path) -> None:
    """The next reader of these files reads from the disk."""
    for path in directory.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)  # what is not on the disk yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
