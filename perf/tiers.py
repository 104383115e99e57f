"""KV tiers on the real model: time to first token of conversations that the device's pool cannot hold, against
recomputation; what transfers cost the streams beside them; and how the eviction policies compare on fixed traces.

One client, one conversation at a time, so that a time to first token is work and not queueing. A conversation opens
with more than its later questions, as those with a system prompt or a document do. What is new in a turn must be
computed whatever the tiers do: the row `device`, whose pool holds everything, says what is left then, and the rest of
a tier's time is the tier's. Every configuration must give the tokens of the first (float32).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import uvloop

from perf.figure import Measurement, Options, percentile
from perf.tier_traces import compare
from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams

DESCRIPTION = "64 conversations of 6 turns where the device holds 8: time to first token with tiers, against without"
NUM_TALKS, NUM_TURNS = 64, 6
HELD_SHARE = 1 / 8
"""Of the conversations, what the device's pool holds."""
OPENING_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 160, 48, 8
BLOCK = 16
_BLOCKS_PER_TALK = (OPENING_TOKENS + NUM_TURNS * (QUESTION_TOKENS + ANSWER_TOKENS)) // BLOCK
_TOKENS = (100, 40_000)
_BLOCK_BYTES = 737_280
"""Of SmolLM2-135M in float32."""


def measure(options: Options) -> Measurement:
    num_talks = 8 if options.quick else NUM_TALKS
    rows, answers, ttft = [], {}, {}
    for kind in ("recomputed", "device", "cpu", "fs"):
        with tempfile.TemporaryDirectory() as directory:
            settings = _tiers(kind, directory, num_talks)
            first_tokens, answers[kind], counts = uvloop.run(_talks(num_talks, options.seed, settings))
        ttft[kind] = first_tokens
        rows.append(
            {
                "tier": kind,
                "ttft_p50_ms": round(percentile(first_tokens, 50) * 1e3, 1),
                "ttft_p95_ms": round(percentile(first_tokens, 95) * 1e3, 1),
                **counts,
            }
        )
        assert answers[kind] == answers["recomputed"], f"the {kind} tier changes tokens"
    gaps: dict[str, list[float]] = {}
    for kind in ("roomy", "cpu"):
        gaps[kind], moved = uvloop.run(_gaps(options.seed, kind, 3 if options.quick else 12))
        middle, tail = (round(percentile(gaps[kind], share) * 1e3, 1) for share in (50, 99))
        rows.append({"tier": f"streams beside {kind}", "itl_p50_ms": middle, "itl_p99_ms": tail, **moved})
    traces = compare(options.seed)
    polluted = next(row for row in traces if row["trace"] == "polluted_by_scans")
    p50 = {kind: percentile(samples, 50) for kind, samples in ttft.items()}
    summary = {
        "ttft_ratio_cpu": round(p50["cpu"] / p50["recomputed"], 3),
        "ttft_ratio_fs": round(p50["fs"] / p50["recomputed"], 3),
        "ttft_ratio_device": round(p50["device"] / p50["recomputed"], 3),
        "itl_p99_ratio_during_transfers": round(percentile(gaps["cpu"], 99) / percentile(gaps["roomy"], 99), 3),
        "hit_ratio_lru": float(polluted["lru"]),
        "hit_ratio_arc": float(polluted["arc"]),
        "arc_worst_relative": round(min(float(row["arc"]) / float(row["lru"]) for row in traces) - 1, 4),
    }
    samples = {f"ttft_s_{kind}": values for kind, values in ttft.items()}
    samples |= {f"gap_s_{kind}": values for kind, values in gaps.items()}
    return Measurement(summary, rows + traces, samples)


def _tiers(kind: str, directory: str, num_talks: int) -> dict[str, Any]:
    """Settings of the engine. The file tier's CPU tier holds as much as the device, so its pages come from files."""
    all_blocks, held_blocks = (num_talks + 2) * _BLOCKS_PER_TALK, int(num_talks * HELD_SHARE) * _BLOCKS_PER_TALK
    pool = {"num_gpu_blocks_override": all_blocks if kind == "device" else held_blocks}
    if kind in ("recomputed", "device"):
        return pool
    extra: dict[str, Any] = {"cpu_bytes_to_use": all_blocks * _BLOCK_BYTES}
    if kind == "fs":
        extra["cpu_bytes_to_use"] = held_blocks * _BLOCK_BYTES
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": directory}]
    return pool | {"kv_transfer_config": msgspec.json.encode({"kv_connector_extra_config": extra}).decode()}


@dataclass
class _Answer:
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def sink(self, delta: Delta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)
        self.tokens += delta.token_ids
        if delta.finish_reason is not None:
            assert delta.finish_reason == "length", delta
            self.done.set()


def _ask(engine: Engine, name: str, prompt: list[int], num_tokens: int) -> _Answer:
    answer = _Answer(time.perf_counter())
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    engine.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params), answer.sink)
    return answer


async def _engine(**settings: Any) -> Engine:
    engine = Engine(EngineConfig(model="smollm2", dtype="float32", block_size=BLOCK, max_num_seqs=16, **settings))
    await engine.start()
    return engine


async def _talks(
    num_talks: int, seed: int, settings: dict[str, Any]
) -> tuple[list[float], list[list[int]], dict[str, int]]:
    """Round after round, each conversation's next turn. Returns (times to first token from the second turn on, all
    answers, counts)."""
    chance = np.random.default_rng(seed)
    engine = await _engine(**settings)
    try:
        history: list[list[int]] = [[] for _ in range(num_talks)]
        ttft, answers = [], []
        for turn in range(NUM_TURNS):
            for talk in range(num_talks):
                num_new = QUESTION_TOKENS if turn else OPENING_TOKENS + QUESTION_TOKENS
                history[talk] += chance.integers(*_TOKENS, num_new).tolist()
                answer = _ask(engine, f"{turn}-{talk}", history[talk], ANSWER_TOKENS)
                await asyncio.wait_for(answer.done.wait(), 120)
                history[talk] += answer.tokens
                answers.append(answer.tokens)
                if turn:
                    ttft.append(answer.times[0] - answer.began)
        stats = engine.stats()
        return ttft, answers, {"prompt_tokens": stats.prompt_tokens, "tokens_hit": stats.prefix_cache_hits}
    finally:
        await engine.stop()


async def _gaps(seed: int, kind: str, num_rounds: int) -> tuple[list[float], dict[str, int]]:
    """Gaps between the tokens of four streams, while conversations come and go whose prefix of 30 blocks lies in the
    device's pool (roomy), or must be loaded each time, while what is new is stored (cpu); and what was moved."""
    chance = np.random.default_rng(seed)
    prefixes = [chance.integers(*_TOKENS, 480).tolist() for _ in range(12)]
    settings: dict[str, Any] = {"num_gpu_blocks_override": 2000}
    if kind == "cpu":
        settings = _tiers("cpu", "", 16) | {"num_gpu_blocks_override": 250}
    engine = await _engine(**settings)
    try:
        for number, prefix in enumerate(prefixes):
            await _ask(engine, f"first-{number}", prefix, 1).done.wait()
        streams = [
            _ask(engine, f"stream-{i}", chance.integers(*_TOKENS, 32).tolist(), 40 * num_rounds) for i in range(4)
        ]
        while not all(stream.times for stream in streams):
            await asyncio.sleep(0.01)
        number = 0
        while not all(stream.done.is_set() for stream in streams):
            prefix = prefixes[number % len(prefixes)] + chance.integers(*_TOKENS, 2 * BLOCK).tolist()
            await _ask(engine, f"turn-{number}", prefix, 1).done.wait()
            await asyncio.sleep(0.05)
            number += 1
        tiers = engine.stats().tiers
        moved = {"loaded_mb": 0, "stored_mb": 0}
        if tiers is not None:
            moved["loaded_mb"] = tiers.device.loaded_blocks * tiers.page_bytes // 10**6
            moved["stored_mb"] = tiers.device.stored_blocks * tiers.page_bytes // 10**6
        return [gap for stream in streams for gap in np.diff(stream.times).tolist()], moved
    finally:
        await engine.stop()
