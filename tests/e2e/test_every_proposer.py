"""Whoever drafts, chains or trees: 64 mixed streams say what each says alone without drafts.

On a tiny model whose every method is right often and wrong often.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.e2e.guessing_heads import save_eagle, save_medusa
from tests.e2e.mixed_streams import CROWDED, NUM_STREAMS, ROOMY, Stream, answered, answered_alone, assert_equal
from tests.e2e.tier_rig import save_tiny_model

LOUDNESS = 0.01
POOLS: dict[str, dict[str, Any]] = {
    "depth 1": {"async_scheduling": False, **ROOMY},
    "depth 2, preempting": {"async_scheduling": True, **CROWDED},
}
METHODS = ("ngram", "ngram tree", "suffix", "draft_model", "eagle", "eagle tree", "medusa", "medusa tree", "grammar")
QUICK = (("ngram", "depth 1"), ("ngram tree", "depth 2, preempting"), ("eagle tree", "depth 2, preempting"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), num_idle=4, loudness=LOUDNESS)


@pytest.fixture(scope="module")
def alone(model: str) -> list[Stream]:
    return uvloop.run(answered_alone(model))


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


CASES = [
    pytest.param(method, pool, False, marks=() if (method, pool) in QUICK else pytest.mark.slow, id=f"{method}, {pool}")
    for method in METHODS
    for pool in POOLS
]
ADAPTIVE = pytest.param("suffix", "depth 2, preempting", True, id="suffix, depth 2, preempting, what pays")


@pytest.mark.parametrize(("method", "pool", "adaptive"), [*CASES, ADAPTIVE])
def test_64_streams_give_what_each_gives_alone_without_drafts(
    model: str, alone: list[Stream], method: str, pool: str, adaptive: bool, tmp_path: Path
) -> None:
    drafts = drafting(method, model, tmp_path, adaptive)
    found, stats = uvloop.run(answered(model, at_once=True, speculative_config=drafts, **POOLS[pool]))
    assert_equal(found, alone)
    assert stats.prefix_cache_hits > 0
    assert (stats.num_preemptions > 0) == (pool == "depth 2, preempting")
    # Many runs, so that some are cut short by an end. With a controller the machine's speed says how many.
    assert stats.num_accepted_tokens > (0 if adaptive else 50)
    if method != "grammar" and not adaptive:
        assert stats.num_accepted_tokens < stats.num_draft_tokens
