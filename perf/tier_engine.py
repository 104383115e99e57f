"""What the parts of the tiers figure share: engines on the real model, and answers with the times of their tokens."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams

BLOCK = 16
BLOCK_BYTES = 737_280
"""Of SmolLM2-135M in float32."""
TOKENS = (100, 40_000)
T = TypeVar("T")


@dataclass
class Answer:
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.began

    def sink(self, delta: Delta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)
        self.tokens += delta.token_ids
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            assert delta.finish_reason == "length", delta
            self.done.set()

    async def finished(self) -> Answer:
        await asyncio.wait_for(self.done.wait(), 300)
        return self


def ask(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> Answer:
    answer = Answer(time.perf_counter())
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    engine.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params), answer.sink)
    return answer


async def started(**settings: Any) -> Engine:
    engine = Engine(EngineConfig(model="smollm2", dtype="float32", block_size=BLOCK, max_num_seqs=16, **settings))
    await engine.start()
    return engine


def tiers(num_blocks: int, directory: str | None = None) -> dict[str, str]:
    """Settings: a CPU tier of so many blocks, and perhaps a directory behind it."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": num_blocks * BLOCK_BYTES}
    if directory is not None:
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": directory}]
    return {"kv_transfer_config": msgspec.json.encode({"kv_connector_extra_config": extra}).decode()}


async def settled(engine: Engine) -> None:
    """Wait until nothing is moved any more, so that it does not burden whoever is measured next."""
    async with asyncio.timeout(120):
        while (stats := engine.stats().tiers) is not None and stats.num_pinned:
            await asyncio.sleep(0.05)


def in_turns(kinds: Sequence[T], round_number: int) -> list[T]:
    """Everybody, and each round somebody else begins."""
    first = round_number % len(kinds)
    return [*kinds[first:], *kinds[:first]]


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
