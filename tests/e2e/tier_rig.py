"""What the tests of KV tiers, and their figure, share: engines with tiers, answers, conversations, a tiny random model.

The tiny model's tokens depend on every byte of its KV: a wrong block shows at once, and steps cost next to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.runtime.stats import Stats
from slipring.scheduler.offload.offload import Offload
from slipring.shm.params import SamplingParams
from tests.small_model import save_random
from tests.waits import settled

BLOCK = 4
BLOCK_BYTES = 737_280 // 4
"""Of SmolLM2-135M in float32, with blocks of 4."""
POOL: dict[str, Any] = {"block_size": BLOCK, "num_gpu_blocks_override": 40}
"""160 tokens: a conversation or two."""
TINY_BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 16 * 4


def tiers(num_slots: int, *slow: dict[str, Any], block_bytes: int = BLOCK_BYTES, **extra: Any) -> dict[str, str]:
    keys = {"cpu_bytes_to_use": num_slots * block_bytes, "secondary_tiers": list(slow)} | extra
    return {"kv_transfer_config": json.dumps({"kv_connector_extra_config": keys})}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@dataclass
class Answer:
    began: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token came, on the clock of `began`."""
    num_cached: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.began

    def sink(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.times += [time.perf_counter()] * len(delta.token_ids)
        self.num_cached = max(self.num_cached, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            assert delta.finish_reason in ("stop", "length"), delta
            self.done.set()


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4, seed: int | None = None) -> Answer:
    answer = Answer()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 0.8, seed=seed or 0)
    engine.submit(GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params), answer.sink)
    return answer


async def finished(answer: Answer) -> list[int]:
    await asyncio.wait_for(answer.done.wait(), 120)
    return answer.tokens


async def started(**settings: Any) -> Engine:
    options: dict[str, Any] = {"model": "smollm2", "max_num_seqs": 16, "max_model_len": 160}
    engine = Engine(EngineConfig(**options | settings, dtype="float32", debug_integrity=True, cpu_threads=1))
    await engine.start()
    return engine


@contextlib.asynccontextmanager
async def running(*settings: dict[str, Any]) -> AsyncIterator[list[Engine]]:
    """One engine for each of `settings`, all on this loop."""
    async with contextlib.AsyncExitStack() as stack:
        engines: list[Engine] = []
        for each in settings:
            engine = await started(**each)
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        yield engines


async def until(true: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for something that nobody tells about."""
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.005)


# --- conversations ------------------------------------------------------------------------------------------------

NUM_TURNS = 5


@dataclass
class Talks:
    """Conversations that arrive in a jumble: shared and own prefixes, greedy and seeded, some abandoned on the way.

    With several engines a conversation's turns go to one after the other, as a load balancer would send them.
    """

    num_talks: int
    seed: int
    tokens: range = range(100, 40_000)
    max_tokens: int = 10

    async def run(self, engines: Sequence[Engine]) -> list[list[int]]:
        """All answers, turn by turn. What is asked depends on nothing but the seed and the answers."""
        chance = random.Random(self.seed)
        shared = self._words(chance, 24)
        history = [(shared if talk % 2 else []) + self._words(chance, 8) for talk in range(self.num_talks)]
        answers: list[list[int]] = []
        for turn in range(NUM_TURNS):
            asked: list[Answer] = []
            leaving: list[asyncio.Future[None]] = []
            for talk in range(self.num_talks):
                history[talk] += self._words(chance, chance.randint(6, 12))
                engine = engines[(talk + turn) % len(engines)]
                seed = talk if talk % 3 == 0 else None
                asked.append(ask(engine, f"{turn}-{talk}", history[talk], self.max_tokens, seed))
                if talk % 4 == 1:
                    prompt, at_once = history[talk].copy(), chance.random() < 0.3
                    leaving.append(asyncio.ensure_future(self._abandon(engine, f"gone-{turn}-{talk}", prompt, at_once)))
            for talk, answer in enumerate(asked):
                history[talk] += await finished(answer)
            answers += [answer.tokens for answer in asked]
            await asyncio.gather(*leaving)
        for engine in engines:
            await settled(engine)
        return answers

    def _words(self, chance: random.Random, count: int) -> list[int]:
        return [chance.choice(self.tokens) for _ in range(count)]

    async def _abandon(self, engine: Engine, name: str, prompt: list[int], at_once: bool) -> None:
        """Ask and go: at once, or as soon as something of the prompt is on its way out of a tier."""
        ask(engine, name, [*prompt, self.tokens[0]], self.max_tokens)
        while not at_once and name in engine.live_ids and not is_loading(engine, name):
            await asyncio.sleep(0.001)
        engine.abort(name)


def is_loading(engine: Engine, name: str) -> bool:
    """Whether a request that still waits has something on its way out of a tier."""
    scheduler, completions = engine.replicas[0].scheduler, engine._live.get(name)
    if scheduler is None or completions is None or not isinstance(scheduler.offload, Offload):
        return False
    prefetch = scheduler.offload.prefetch_of(completions[0].request)
    return prefetch is not None and (prefetch.promoting or prefetch.num_loading > 0)


def num_loaded(stats: Sequence[Stats]) -> int:
    return sum(each.tiers.device.loaded_blocks for each in stats if each.tiers is not None)


def num_promoted(stats: Sequence[Stats]) -> int:
    return sum(each.tiers.tiers.promoted for each in stats if each.tiers is not None)


# --- a tiny model -------------------------------------------------------------------------------------------------

TINY_TOKENS = range(4, 260)


def save_tiny_model(path: Path, num_idle: int = 0, loudness: float = 1.0) -> str:
    """A Llama of random weights, with a tokenizer whose tokens are bytes. Returns its path.

    `num_idle` layers more do nothing, and so take time: without them it is a draft model that is always right. With a
    small `loudness` a token says most about the next one, so that others guess well, too.
    """
    save_random(path, 260, 512, num_idle, loudness)
    names = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def tiny(model: str, **settings: Any) -> dict[str, Any]:
    """Settings of an engine on the tiny model; its pool holds a conversation or two, unless they say otherwise."""
    return {"model": model} | POOL | settings


def tiny_tiers(num_slots: int, *slow: dict[str, Any], **extra: Any) -> dict[str, str]:
    return tiers(num_slots, *slow, block_bytes=TINY_BLOCK_BYTES, **extra)
