"""Prefix affinity: conversations of several turns over two replicas find almost what one replica finds."""

from __future__ import annotations

import random

from tests.runtime.test_engine import ask, run, running, submit


async def hit_rate(num_replicas: int) -> float:
    rng = random.Random(3)
    system = [11] * 48
    talks = [system + [rng.randrange(3, 9000) for _ in range(20)] for _ in range(12)]
    async with running(data_parallel_size=num_replicas, num_gpu_blocks_override=512) as engine:
        for turn in range(6):
            order = list(range(len(talks)))
            rng.shuffle(order)
            for batch in (order[i : i + 4] for i in range(0, len(order), 4)):
                asked = [(i, submit(engine, ask(talks[i], 8, seed=turn))) for i in batch]
                for i, stream in asked:
                    await stream.wait()
                    talks[i] += stream.tokens() + [rng.randrange(3, 9000) for _ in range(24)]
        stats = engine.stats()
        if num_replicas > 1:
            steps = [replica.counters.num_steps for replica in engine.replicas]
            assert min(steps) > 0.2 * max(steps), "both work"
        return stats.prefix_cache_hits / stats.prefix_cache_queries


def test_two_replicas_hit_within_five_percent_of_one() -> None:
    rates: list[float] = []

    async def scenario() -> None:
        rates.extend([await hit_rate(num_replicas) for num_replicas in (1, 2)])

    run(scenario())
    one, two = rates
    assert one > 0.6 and two >= 0.95 * one, rates
