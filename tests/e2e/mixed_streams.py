"""64 streams of every kind, side by side on a tiny random model, and what it means that two runs of them are equal.

Compared are tokens, texts, reasons to end and log-probabilities. Streams end by stop tokens, stop strings and
`max_tokens`, in the middle of accepted drafts too; some are aborted, some are bound by a grammar, some share a prefix.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest, TokenLogprob
from slipring.runtime.stats import Stats
from slipring.shm.params import SamplingParams
from tests.e2e.tier_rig import TINY_TOKENS
from tests.waits import settled

NUM_STREAMS = 64
PATTERN = "(left|right|straight ahead){4}(, and then the same again.){2}"
ROOMY = {"num_gpu_blocks_override": 2000}
CROWDED = {"num_gpu_blocks_override": 60}
"""240 tokens: the longest stream fits alone, and little beside it."""


@dataclass
class Stream:
    number: int
    prompt: list[int]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    bound: bool = False
    abort_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def sink(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            assert delta.finish_reason in ("stop", "length", "abort"), delta
            self.ended = f"{delta.finish_reason} {delta.stop_reason}"
            self.done.set()


def streams() -> list[Stream]:
    chance = random.Random(3)
    shared = [chance.choice(TINY_TOKENS) for _ in range(24)]
    return [_stream(number, shared, chance) for number in range(NUM_STREAMS)]


def _stream(number: int, shared: list[int], chance: random.Random) -> Stream:
    own = [chance.choice(TINY_TOKENS) for _ in range(chance.choice([1, 3, 8, 20]))]
    bound = number % 8 == 6
    params = SamplingParams(
        max_tokens=chance.choice([1, 2, 9, 40, 75]) if not bound else 64,
        temperature=0.7 if number % 2 else 0.0,
        top_k=8 if number % 4 == 3 else 0,
        top_p=0.9 if number % 6 == 1 else 1.0,
        min_p=0.05 if number % 10 == 7 else 0.0,
        repetition_penalty=1.1 if number % 5 == 2 else 1.0,
        frequency_penalty=0.3 if number % 7 == 4 else 0.0,
        logit_bias=((77, 2.0), (99, -5.0)) if number % 9 == 2 else (),
        bad_words=((97,), (120, 60)) if number % 11 == 5 else (),
        min_tokens=5 if number % 6 == 4 and not bound else 0,
        stop_token_ids=(2,) if bound else tuple(range(20, 250, 45)),
        logprobs=2 if number % 3 == 1 else -1,
        seed=number,
    )
    stop = ("e", "Q", "7k") if number % 5 == 3 and not bound else ()
    prompt = (shared if number % 3 == 0 else []) + own
    return Stream(number, prompt, params, stop, bound, abort_after=3 if number % 16 == 13 else None)


@asynccontextmanager
async def started(model: str, **settings: Any) -> AsyncIterator[Engine]:
    options: dict[str, Any] = {"max_num_seqs": NUM_STREAMS, "block_size": 4, "cpu_threads": 1, "debug_integrity": True}
    engine = Engine(EngineConfig(model=model, dtype="float32", **options, **settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def answered(model: str, at_once: bool, **settings: Any) -> tuple[list[Stream], Stats]:
    async with started(model, **settings) as engine:
        found = streams()
        await run(engine, found, at_once)
        await settled(engine)
        return found, engine.stats()


async def answered_alone(model: str) -> list[Stream]:
    """Each stream on its own, with nothing cached and one step in flight."""
    settings = {"async_scheduling": False, "enable_prefix_caching": False, **ROOMY}
    return (await answered(model, at_once=False, **settings))[0]


async def run(engine: Engine, found: list[Stream], at_once: bool) -> None:
    grammar = await engine.compile_grammar(GrammarSpec("regex", PATTERN), "regex")
    for stream in found:
        _submit(engine, stream, grammar)
        if not at_once:
            await asyncio.wait_for(stream.done.wait(), 60)
        elif stream.number % 8 == 7:
            await asyncio.sleep(0.01)  # arrivals, not one batch
    for stream in found:
        await asyncio.wait_for(stream.done.wait(), 120)


def _submit(engine: Engine, stream: Stream, grammar: Grammar) -> None:
    request = GenerationRequest(
        request_id=str(stream.number),
        prompt_token_ids=stream.prompt,
        params=stream.params,
        stop=stream.stop,
        grammar=grammar if stream.bound else None,
    )

    def sink(delta: Delta) -> None:
        stream.sink(delta)
        if stream.abort_after is not None and len(stream.tokens) >= stream.abort_after and not stream.done.is_set():
            asyncio.get_running_loop().call_soon(engine.abort, request.request_id)
            stream.done.set()

    engine.submit(request, sink)


def assert_equal(got: Sequence[Stream], want: Sequence[Stream]) -> None:
    for stream, reference in zip(got, want, strict=True):
        if stream.abort_after is not None:
            common = min(len(stream.tokens), len(reference.tokens))  # nobody knows how far each of them came
            assert stream.tokens[:common] == reference.tokens[:common], stream.number
            continue
        assert stream.tokens == reference.tokens, stream.number
        assert (stream.text, stream.ended) == (reference.text, reference.ended), stream.number
        for logprob, expected in zip(stream.logprobs, reference.logprobs, strict=True):
            assert logprob.token_id == expected.token_id
            assert logprob.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert {stream.ended.split()[0] for stream in got if stream.ended} >= {"stop", "length"}
