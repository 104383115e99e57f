"""Neighbours, batch, depth, cache and preemption change nothing: 64 mixed streams say what each says alone.

On a tiny model whose tokens depend on every byte of its KV. Drafts are `test_every_proposer.py`'s, the real model
`test_smollm2.py`'s.
"""

from __future__ import annotations

import pytest
import uvloop

from tests.e2e.mixed_streams import CROWDED, ROOMY, Stream, answered, answered_alone, assert_equal
from tests.e2e.tier_rig import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model: str) -> list[Stream]:
    return uvloop.run(answered_alone(model))


@pytest.mark.parametrize(
    ("depth_two", "caching", "pool"),
    [(True, True, ROOMY), (True, False, CROWDED), (False, True, CROWDED), (False, False, ROOMY)],
    ids=["depth 2, cached", "depth 2, preempting", "depth 1, cached, preempting", "depth 1"],
)
def test_64_streams_give_what_each_gives_alone(
    model: str, alone: list[Stream], depth_two: bool, caching: bool, pool: dict[str, int]
) -> None:
    settings = {"async_scheduling": depth_two, "enable_prefix_caching": caching, **pool}
    found, stats = uvloop.run(answered(model, at_once=True, **settings))
    assert_equal(found, alone)
    assert (stats.num_preemptions > 0) == (pool is CROWDED)
    assert (stats.prefix_cache_hits > 0) == caching
