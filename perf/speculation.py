"""Speculation on the real model: time per output token with it, against without, in interleaved runs.

Both engines stand side by side and take turns, so that what else the machine does hits both. Every stream must give
the same tokens with and without (float32; near ties are excused, as everywhere). `SPECULATION_HEAD` names the
directory of an EAGLE head (`slipring train-draft`), which is measured too then.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass, field

import uvloop

from perf.figure import Measurement, Options
from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams

DESCRIPTION = "speculation against none: accepted length and time per output token, by method and kind of text"
_LIST = "alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa, lambda, mu, nu, xi, omicron, pi, rho"
REPEATING = [f"Copy the list.\nList: {_LIST}\nCopy: {_LIST}\nCopy: {_LIST}\nCopy:"]
FREE = [
    "Write a short story about a lighthouse.",
    "Explain photosynthesis to a child.",
    "What are the advantages of trains?",
    "Give me five facts about whales.",
]
NUM_STREAMS = 64
MOST_DIFFERENT = 0.02


@dataclass
class Stream:
    prompt: list[int]
    temperature: float = 0.0
    seed: int = 1
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def tpot_s(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def measure(options: Options) -> Measurement:
    return uvloop.run(_measure(options))


async def _measure(options: Options) -> Measurement:
    methods = {"ngram": json.dumps({"method": "ngram", "num_speculative_tokens": 5})}
    if head := os.environ.get("SPECULATION_HEAD"):
        methods["eagle"] = json.dumps({"method": "eagle", "model": head, "num_speculative_tokens": 3})
    summary, table, samples = {}, [], {}
    for method, config in methods.items():
        for workload in ("repeating", "free", "64 streams"):
            row, ratios = await _compare(method, config, workload, options)
            table.append(row)
            key = f"{method}_{workload.replace(' ', '_')}"
            summary[f"tpot_ratio_{key}"] = row["tpot_ratio"]
            summary[f"accepted_length_mean_{key}"] = row["accepted_length_mean"]
            samples[key] = ratios
    return Measurement(summary, table, samples, "tpot_ratio: without / with, so larger is better; the bonus is counted")


async def _compare(method: str, config: str, workload: str, options: Options) -> tuple[dict, list[float]]:
    """One row, and the ratio of each pair of runs."""
    plain, drafting = await _engine(None), await _engine(config)
    try:
        ratios, times = [], {"without": [], "with": []}
        for run in range(3 if options.quick else 7):
            without = await _run(plain, workload, options, f"{run}-without")
            with_drafts = await _run(drafting, workload, options, f"{run}-with")
            different = sum(a.tokens != b.tokens for a, b in zip(without, with_drafts, strict=True))
            assert different <= MOST_DIFFERENT * len(without), f"{different} of {len(without)} streams differ"
            if run == 0:
                continue  # caches fill, and the controller learns
            for kind, streams in (("without", without), ("with", with_drafts)):
                times[kind].append(statistics.mean(stream.tpot_s for stream in streams))
            ratios.append(round(times["without"][-1] / times["with"][-1], 4))
        stats = drafting.stats()
        return {
            "method": method,
            "workload": workload,
            "accepted_length_mean": round(1 + stats.num_accepted_tokens / max(1, stats.num_drafts), 3),
            "tpot_ratio": round(statistics.median(ratios), 3),
            "tpot_ms_without": round(statistics.median(times["without"]) * 1e3, 2),
            "tpot_ms_with": round(statistics.median(times["with"]) * 1e3, 2),
        }, ratios
    finally:
        await plain.stop()
        await drafting.stop()


async def _engine(config: str | None) -> Engine:
    engine = Engine(
        EngineConfig(
            model="smollm2",
            dtype="float32",
            max_num_seqs=NUM_STREAMS,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
            speculative_config=config,
        )
    )
    await engine.start()
    return engine


async def _run(engine: Engine, workload: str, options: Options, name: str) -> list[Stream]:
    """The workload's streams: one after the other, or 64 at once."""
    num_tokens = 32 if options.quick else 128
    streams = _streams(engine, workload)
    if workload == "64 streams":
        await asyncio.gather(*[_generate(engine, s, f"{name}-{i}", num_tokens // 2) for i, s in enumerate(streams)])
    else:
        for number, stream in enumerate(streams):
            await _generate(engine, stream, f"{name}-{number}", num_tokens)
    return streams


def _streams(engine: Engine, workload: str) -> list[Stream]:
    encode, template = engine.tokenizer.encode, engine.chat_template
    assert template is not None
    if workload == "repeating":
        return [Stream(encode(text)) for text in REPEATING]
    questions = [encode(template.render([{"role": "user", "content": text}])) for text in FREE]
    if workload == "free":
        return [Stream(question) for question in questions]
    return [Stream(questions[i % len(questions)], 0.8 if i % 2 else 0.0, i) for i in range(NUM_STREAMS)]


async def _generate(engine: Engine, stream: Stream, request_id: str, num_tokens: int) -> None:
    done = asyncio.Event()

    def sink(delta: Delta) -> None:
        stream.tokens += delta.token_ids
        stream.times += [time.perf_counter()] * len(delta.token_ids)
        if delta.finish_reason is not None:
            done.set()

    params = SamplingParams(max_tokens=num_tokens, temperature=stream.temperature, seed=stream.seed)
    engine.submit(GenerationRequest(request_id=request_id, prompt_token_ids=stream.prompt, params=params), sink)
    await done.wait()
