"""What a grammar costs: 32 streams of SmolLM2 at pipeline depth 2, bound to a schema and free, in turns in one run.

Every stream writes the same number of tokens: the schema is a long array, and free streams ignore the end of sequence.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import uvloop

from perf.figure import Measurement, Options
from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest, SamplingParams

DESCRIPTION = "throughput of 32 constrained streams on SmolLM2, against free ones in the same run"
STREAMS = 32
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


def measure(options: Options) -> Measurement:
    runs, num_tokens = (1, 48) if options.quick else (5, 128)
    free, bound = uvloop.run(_run(runs, num_tokens))
    ratio = statistics.median(b / f for b, f in zip(bound, free, strict=True))
    table = [
        {"streams": STREAMS, "free_tokens_per_s": round(statistics.median(free)),
         "constrained_tokens_per_s": round(statistics.median(bound)), "ratio": round(ratio, 3)}
    ]  # fmt: skip
    samples = {"free_tokens_per_s": free, "constrained_tokens_per_s": bound}
    return Measurement({"ratio": round(ratio, 3)}, table, samples)


async def _run(runs: int, num_tokens: int) -> tuple[list[float], list[float]]:
    engine = Engine(EngineConfig(model="smollm2", max_num_seqs=STREAMS, enable_prefix_caching=False))
    await engine.start()
    try:
        grammar = await engine.compile_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)), "schema")
        await _throughput(engine, grammar, 8)  # warm
        free, bound = [], []
        for _ in range(runs):
            free.append(await _throughput(engine, None, num_tokens))
            bound.append(await _throughput(engine, grammar, num_tokens))
        return free, bound
    finally:
        await engine.stop()


async def _throughput(engine: Engine, grammar: Grammar | None, num_tokens: int) -> float:
    """Tokens a second over all streams."""
    began = time.perf_counter()
    texts = await asyncio.gather(*(_stream(engine, grammar, num_tokens, seed) for seed in range(STREAMS)))
    seconds = time.perf_counter() - began
    assert grammar is None or all(text.lstrip().startswith("[") for text in texts), "an answer left its grammar"
    return STREAMS * num_tokens / seconds


async def _stream(engine: Engine, grammar: Grammar | None, num_tokens: int, seed: int) -> str:
    done, deltas = asyncio.Event(), []

    def sink(delta: Delta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            done.set()

    params = SamplingParams(max_tokens=num_tokens, temperature=0.8, top_k=50, seed=seed)
    prompt = engine.tokenizer.encode(f"Write a list of {seed + 3} people as JSON.")
    engine.submit(
        GenerationRequest(
            request_id=f"{grammar is not None}-{seed}", prompt_token_ids=prompt, params=params, grammar=grammar
        ),
        sink,
    )
    await done.wait()
    assert sum(len(delta.token_ids) for delta in deltas) == num_tokens, deltas[-1]
    return "".join(delta.text for delta in deltas)
