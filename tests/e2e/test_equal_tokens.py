"""Neighbours, batch, depth, cache and preemption change no token: the real model in float32, through the engine.

"Equal" is the design's: compared up to the first difference, which is excused only if, scored alone, the two best
final scores (noise included) lie within 1e-3; at most 2 % of the streams may be excused. Since the noise of a seeded
stream is part of its score, a seeded difference is excused by the same rule with the sampler's own noise, which this
test does not recompute: it allows the 2 % and nothing else for those.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
import uvloop

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.runtime.stats import Stats
from slipring.shm.params import SamplingParams

TEXT = "the ocean is wide and a small boat goes over it while people on land wait for news of rain wind or fish"
WORDS = TEXT.split()
NUM_STREAMS = 64
NGRAM = """{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
 "num_speculative_tokens_per_batch_size": [[1, 64, 4]]}"""
TREES = NGRAM.replace("64, 4", "64, 12").replace(": 4,", ': 4, "num_draft_tree_tokens": 12,')
SMALL_POOL = {"block_size": 4, "num_gpu_blocks_override": 64}
"""256 tokens: the longest stream fits alone, and little beside it."""


@dataclass
class Stream:
    number: int
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def sink(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        for logprob in delta.logprobs or ():
            self.margins.append(logprob.top[0][1] - logprob.top[1][1])
        if delta.finish_reason is not None:
            assert delta.finish_reason in ("stop", "length"), delta
            self.done.set()


def streams(engine: Engine) -> list[Stream]:
    """Mixed lengths, half of them seeded and half greedy; some share a prefix, some are aborted on the way."""
    rng = random.Random(7)
    shared = " ".join(rng.choice(WORDS) for _ in range(40))
    found = []
    for number in range(NUM_STREAMS):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 5, 20, 40, 80])))
        prompt = engine.tokenizer.encode((shared + " " if number % 4 == 0 else "") + text)
        seeded = number % 2 == 1
        params = SamplingParams(
            max_tokens=48 if number % 32 in (2, 3, 4, 5) else rng.choice([3, 8, 12]),
            temperature=0.8 if seeded else 0.0,
            top_p=0.9 if number % 6 == 1 else 1.0,
            top_k=20 if number % 6 == 3 else 0,
            repetition_penalty=1.2 if number % 8 == 5 else 1.0,
            seed=number,
            stop_token_ids=(*engine.spec.eos_token_ids, engine.tokenizer.encode(" rain")[0]),
            logprobs=2,
        )
        found.append(Stream(number, prompt, params, abort_after=3 if number % 16 == 15 else None))
    return found


async def run_all(engine: Engine, all_streams: list[Stream], at_once: bool) -> None:
    for stream in all_streams:
        request = GenerationRequest(
            request_id=f"{stream.number}-{at_once}", prompt_token_ids=stream.prompt, params=stream.params
        )
        engine.submit(request, stream.sink)
        if not at_once:
            await stream.done.wait()
        elif stream.number % 5 == 0:
            await asyncio.sleep(0.02)  # arrivals, not one batch
        if at_once and stream.abort_after is not None:
            asyncio.get_running_loop().create_task(abort_later(engine, stream, request.request_id))
    for stream in all_streams:
        await asyncio.wait_for(stream.done.wait(), 240)


async def abort_later(engine: Engine, stream: Stream, request_id: str) -> None:
    while len(stream.tokens) < (stream.abort_after or 0) and not stream.done.is_set():
        await asyncio.sleep(0.01)
    engine.abort(request_id)
    stream.done.set()


async def tokens_of(at_once: bool, **settings: object) -> tuple[list[Stream], Stats]:
    engine = Engine(EngineConfig(model="smollm2", dtype="float32", max_num_seqs=64, **settings))  # type: ignore[arg-type]
    await engine.start()
    try:
        found = streams(engine)
        await run_all(engine, found, at_once)
        for _ in range(200):
            stats = engine.stats()
            if stats.num_free_blocks == stats.num_blocks:
                break
            await asyncio.sleep(0.01)
        assert stats.num_free_blocks == stats.num_blocks and stats.num_running == stats.num_waiting == 0
        return found, stats
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def alone() -> list[Stream]:
    """Each stream on its own, with nothing cached and one step in flight."""
    settings = {"async_scheduling": False, "enable_prefix_caching": False}
    return uvloop.run(tokens_of(at_once=False, **settings))[0]


def assert_equal(got: list[Stream], want: list[Stream]) -> None:
    excused = 0
    for stream, reference in zip(got, want, strict=True):
        expected = reference.tokens if stream.abort_after is None else reference.tokens[: len(stream.tokens)]
        if stream.tokens == expected:
            continue
        pairs = enumerate(zip(stream.tokens, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(stream.tokens), len(expected)))
        greedy = stream.params.temperature == 0 and stream.params.repetition_penalty == 1.0
        assert not greedy or reference.margins[at] < 1e-3, f"stream {stream.number} differs at token {at}"
        excused += 1
    assert excused <= len(got) * 0.02, f"{excused} of {len(got)} streams differ"


@pytest.mark.parametrize(
    ("depth_two", "caching", "pool"),
    [(True, True, {}), (True, False, SMALL_POOL), (False, True, SMALL_POOL), (False, False, {})],
    ids=["depth 2, cached", "depth 2, preempting", "depth 1, cached, preempting", "depth 1"],
)
def test_64_streams_give_what_each_gives_alone(
    alone: list[Stream], depth_two: bool, caching: bool, pool: dict[str, int]
) -> None:
    got, stats = uvloop.run(tokens_of(at_once=True, async_scheduling=depth_two, enable_prefix_caching=caching, **pool))
    assert_equal(got, alone)
    assert (stats.num_preemptions > 0) == bool(pool)
    assert (stats.prefix_cache_hits > 0) == caching


@pytest.mark.parametrize(
    ("drafts", "depth_two", "pool"),
    [
        pytest.param(NGRAM, False, {}, id="chains, depth 1"),
        pytest.param(TREES, True, SMALL_POOL, id="trees, depth 2, preempting"),
        pytest.param(NGRAM, True, SMALL_POOL, id="chains, depth 2, preempting", marks=pytest.mark.slow),
        pytest.param(TREES, False, {}, id="trees, depth 1", marks=pytest.mark.slow),
    ],
)
def test_64_streams_with_drafts_give_what_each_gives_alone_without(
    alone: list[Stream], drafts: str, depth_two: bool, pool: dict[str, int]
) -> None:
    got, stats = uvloop.run(tokens_of(at_once=True, async_scheduling=depth_two, speculative_config=drafts, **pool))
    assert_equal(got, alone)
    assert (stats.num_preemptions > 0) == bool(pool)
    assert stats.prefix_cache_hits > 0
    assert stats.num_drafts > 10 and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert len(stats.num_accepted_per_position or ()) == 4
