"""A worker that is killed in the middle of a speculating batch, or a pool too small for it: every token as without.

On a tiny random model, whose steps cost next to nothing. Greedy, seeded and constrained streams, side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine, HealthState
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams
from tests.e2e.eagle_rig import random_head
from tests.e2e.tier_rig import TINY_TOKENS, save_tiny_model

NUM_STREAMS, NUM_TOKENS = 14, 100
PATTERN = "(left|right|straight ahead){8}(, and then the same again.){4}"
WIDE: dict[str, object] = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 16, 4]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(model: str) -> list[list[int]]:
    return uvloop.run(_tokens(model, None, False))


@pytest.mark.parametrize(
    "method", ["ngram", "eagle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("suffix", "draft_model"))]
)
def test_a_speculating_batch_goes_on_with_its_tokens(
    model: str, undisturbed: list[list[int]], method: str, tmp_path: Path
) -> None:
    config = _config(method, model, tmp_path)
    assert uvloop.run(_tokens(model, config, True)) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kills", [True, False], ids=["killed", "preempted"])
def test_under_rejection_sampling_greedy_streams_are_as_without_and_none_is_cut(
    model: str, undisturbed: list[list[int]], kills: bool, tmp_path: Path
) -> None:
    changes = {"rejection_sample_method": "standard", "adaptive": False}  # whatever drafts cost on this machine
    config = json.dumps(json.loads(_config("draft_model", model, tmp_path)) | changes)
    found = uvloop.run(_tokens(model, config, kills, num_gpu_blocks_override=400 if kills else 50))
    assert found[::2] == undisturbed[::2]
    assert found[1::2] != undisturbed[1::2]
    assert all(len(found[number]) == NUM_TOKENS for number in range(NUM_STREAMS) if number % 7 < 5)


@pytest.mark.parametrize("method", ["suffix", "draft_model", "ngram tree", "eagle tree"])
def test_preemption_changes_no_token(model: str, undisturbed: list[list[int]], method: str, tmp_path: Path) -> None:
    config = _config(method, model, tmp_path)
    found = uvloop.run(
        _tokens(model, config, False, num_gpu_blocks_override=50, async_scheduling=method != "draft_model")
    )
    assert found == undisturbed


def _config(method: str, model: str, directory: Path) -> str:
    method, *branching = method.split()
    config: dict[str, object] = {"method": method} | WIDE
    if method == "draft_model":
        config["model"] = model
    if method == "eagle":
        config = {**json.loads(random_head(model, directory)), **WIDE}
    if branching:
        config |= {"num_draft_tree_tokens": 12, "num_speculative_tokens_per_batch_size": [[1, 16, 12]]}
    return json.dumps(config)


async def _tokens(model: str, config: str | None, kills: bool, **settings: Any) -> list[list[int]]:
    settings = {"num_gpu_blocks_override": 400, "speculative_config": config, **settings}
    engine = Engine(EngineConfig(model=model, max_num_seqs=16, cpu_threads=1, **settings))
    await engine.start()
    try:
        grammar = await engine.compile_grammar(GrammarSpec("regex", PATTERN), "regex")
        streams = [_submit(engine, number, grammar) for number in range(NUM_STREAMS)]
        if kills:
            while sum(len(tokens) for tokens, _ in streams) < NUM_STREAMS * NUM_TOKENS // 3:
                await asyncio.sleep(0)
            before = engine.stats().num_accepted_tokens
            await _kill(engine)
            assert before > 0, "it did not speculate"
        for _, done in streams:
            await asyncio.wait_for(done.wait(), 60)
        stats = engine.stats()
        assert config is None or stats.num_drafts > NUM_STREAMS
        assert (stats.num_preemptions > 0) == (settings["num_gpu_blocks_override"] < 100)
        return [tokens for tokens, _ in streams]
    finally:
        await engine.stop()


def _submit(engine: Engine, number: int, grammar: Grammar) -> tuple[list[int], asyncio.Event]:
    tokens, done = list[int](), asyncio.Event()

    def sink(delta: Delta) -> None:
        tokens.extend(delta.token_ids)
        if delta.finish_reason is not None:
            assert delta.finish_reason in ("stop", "length"), delta
            done.set()

    seeded, bound = number % 2 == 1, number % 7 >= 5
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=0.7 if seeded else 0.0,
        top_k=8 if number % 4 == 3 else 0,
        repetition_penalty=1.1 if number % 5 == 2 else 1.0,
        seed=number,
        stop_token_ids=engine.spec.eos_token_ids if bound else (),
    )
    prompt = [TINY_TOKENS[(number * 31 + place * 7) % 100] for place in range(12)] * 2
    request_id, bound_by = str(number), grammar if bound else None
    engine.submit(
        GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params, grammar=bound_by), sink
    )
    return tokens, done


async def _kill(engine: Engine) -> None:
    began = time.monotonic()
    os.kill(engine.worker_pids[0], signal.SIGKILL)
    for healthy in (True, False):
        while (engine.health().state is HealthState.HEALTHY) is healthy:
            assert time.monotonic() - began < 60
            await asyncio.sleep(0.001)
