"""Whoever drafts, chains or trees: 64 mixed streams say what each says alone without drafts.

On a tiny model whose every method is right often and wrong often. Compared are tokens, texts, reasons to end and
log-probabilities. Streams end by stop tokens, stop strings and `max_tokens` in the middle of accepted runs, some are
aborted, some are bound by a grammar, some share a prefix.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest, TokenLogprob
from slipring.runtime.stats import Stats
from slipring.shm.params import SamplingParams
from tests.e2e.guessing_heads import save_eagle, save_medusa
from tests.e2e.tier_rig import TINY_TOKENS, save_tiny_model, settled

NUM_STREAMS = 64
LOUDNESS = 0.01
PATTERN = "(left|right|straight ahead){4}(, and then the same again.){2}"
POOLS: dict[str, dict[str, Any]] = {
    "depth 1": {"async_scheduling": False, "num_gpu_blocks_override": 2000},
    "depth 2, preempting": {"async_scheduling": True, "num_gpu_blocks_override": 60},
}
METHODS = ("ngram", "ngram tree", "suffix", "draft_model", "eagle", "eagle tree", "medusa", "medusa tree", "grammar")


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


@dataclass
class Answers:
    streams: list[Stream]
    stats: Stats


async def answered(model: str, at_once: bool, **settings: Any) -> Answers:
    options: dict[str, Any] = {"max_num_seqs": NUM_STREAMS, "block_size": 4, "cpu_threads": 1, "debug_integrity": True}
    engine = Engine(EngineConfig(model=model, dtype="float32", **options, **settings))
    await engine.start()
    try:
        grammar, found = await engine.compile_grammar(GrammarSpec("regex", PATTERN), "regex"), streams()
        for stream in found:
            submit(engine, stream, grammar)
            if not at_once:
                await asyncio.wait_for(stream.done.wait(), 60)
            elif stream.number % 8 == 7:
                await asyncio.sleep(0.01)  # arrivals, not one batch
        for stream in found:
            await asyncio.wait_for(stream.done.wait(), 120)
        await settled(engine)
        return Answers(found, engine.stats())
    finally:
        await engine.stop()


def submit(engine: Engine, stream: Stream, grammar: Grammar) -> None:
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), num_idle=4, loudness=LOUDNESS)


@pytest.fixture(scope="module")
def alone(model: str) -> list[Stream]:
    """Each stream on its own, with nothing cached and one step in flight."""
    settings = {"async_scheduling": False, "enable_prefix_caching": False, "num_gpu_blocks_override": 100}
    return uvloop.run(answered(model, at_once=False, **settings)).streams


def drafting(method: str, model: str, directory: Path, adaptive: bool) -> str:
    method, *branching = method.split()
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    most = 12 if branching else 4
    config["num_speculative_tokens_per_batch_size"] = [[1, NUM_STREAMS, most]]
    config["adaptive"] = adaptive
    if branching:
        config["num_draft_tree_tokens"] = most
    if method == "draft_model":
        config["model"] = save_tiny_model(directory / "draft", loudness=LOUDNESS)
    if method == "eagle":
        config["model"] = save_eagle(model, directory / "eagle", LOUDNESS)
    if method == "medusa":
        config["model"] = save_medusa(model, directory / "medusa")
    return json.dumps(config)


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


QUICK = ("eagle tree", "depth 2, preempting")
CASES = [
    pytest.param(method, pool, marks=() if (method, pool) == QUICK else pytest.mark.slow, id=f"{method}, {pool}")
    for method in METHODS
    for pool in POOLS
]


@pytest.mark.parametrize(("method", "pool"), CASES)
def test_64_streams_give_what_each_gives_alone_without_drafts(
    model: str, alone: list[Stream], method: str, pool: str, tmp_path: Path
) -> None:
    preempts = pool == "depth 2, preempting"
    # With a controller it is the machine's speed that says how much is drafted.
    drafts = drafting(method, model, tmp_path, adaptive=not preempts)
    found = uvloop.run(answered(model, at_once=True, speculative_config=drafts, **POOLS[pool]))
    assert_equal(found.streams, alone)
    stats = found.stats
    assert stats.prefix_cache_hits > 0
    assert (stats.num_preemptions > 0) == preempts
    assert {stream.ended.split()[0] for stream in found.streams if stream.ended} == {"stop", "length"}
    if preempts:
        # Many runs, so that some are cut short by an end.
        assert stats.num_accepted_tokens > 50
        assert method == "grammar" or stats.num_accepted_tokens < stats.num_draft_tokens
