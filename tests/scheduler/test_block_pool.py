"""The block pool against a slow, obviously right model: a list in order of use and a dict of contents."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.prefix_cache import chain_root, extend_chain


class SlowPool:
    """Blank blocks: a stack. Cached ones: a list, least recently freed first."""

    def __init__(self, num_blocks: int) -> None:
        self.blank = list(range(num_blocks - 1, -1, -1))
        self.cached: list[int] = []
        self.ref = [0] * num_blocks
        self.content: dict[bytes, int] = {}

    def pop(self, count: int) -> list[int] | None:
        if count > len(self.blank) + len(self.cached):
            return None
        blocks = []
        for _ in range(count):
            block = self.blank.pop() if self.blank else self.cached.pop(0)
            self.content = {h: b for h, b in self.content.items() if b != block}
            self.ref[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ref[block] -= 1
            if self.ref[block] == 0:
                (self.cached if block in self.content.values() else self.blank).append(block)

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.ref[block] == 0:
                self.cached.remove(block)
            self.ref[block] += 1

    def insert(self, block_hash: bytes, block: int) -> None:
        if block not in self.content.values():
            self.content.setdefault(block_hash, block)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["pop", "release", "take", "insert"]), st.integers(0, 40))),
)
def test_against_the_slow_model(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    pool, slow = BlockPool(num_blocks), SlowPool(num_blocks)
    holders: list[list[int]] = []
    for operation, number in operations:
        if operation == "pop":
            got, want = pool.pop(number % (num_blocks + 2)), slow.pop(number % (num_blocks + 2))
            assert (got is None) == (want is None)
            if got is not None:
                assert got.tolist() == want
                holders.append(got.tolist())
        elif operation == "release" and holders:
            blocks = holders.pop(number % len(holders))
            pool.release(blocks), slow.release(blocks)
        elif operation == "take":
            hashes = [bytes([number % 5])]
            blocks = pool.match(hashes)
            assert blocks == ([slow.content[hashes[0]]] if hashes[0] in slow.content else [])
            if blocks:
                assert pool.num_free_among(blocks) == sum(slow.ref[b] == 0 for b in blocks)
                pool.take(blocks), slow.take(blocks)
                holders.append(blocks)
        elif operation == "insert" and holders and holders[-1]:
            block = holders[-1][number % len(holders[-1])]
            pool.insert(bytes([number % 5]), block), slow.insert(bytes([number % 5]), block)
        pool.check_integrity([np.array(blocks, np.int32) for blocks in holders])
        assert pool.num_free == len(slow.blank) + len(slow.cached)
        assert pool.num_cached == len(slow.cached)


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    blocks = pool.pop(4)
    assert blocks is not None
    for index, block in enumerate(blocks.tolist()):
        pool.insert(bytes([index]), block)
    pool.release(blocks)
    assert pool.pop(1) == blocks[3:]
    assert pool.match([bytes([i]) for i in range(4)]) == blocks[:3].tolist()


def test_forgetting_keeps_what_is_held() -> None:
    pool = BlockPool(4)
    held, freed = pool.pop(2), pool.pop(2)
    assert held is not None and freed is not None
    pool.insert(b"a", int(held[0])), pool.insert(b"b", int(freed[0]))
    pool.release(freed)
    pool.forget_all()
    assert pool.match([b"a"]) == pool.match([b"b"]) == []
    pool.check_integrity([held])


def test_hashes_cover_the_whole_prefix_and_are_unambiguous() -> None:
    def chain(tokens: list[int], salt: str | None = None) -> list[bytes]:
        return extend_chain(chain_root(salt), np.array(tokens, np.int32), 2)

    assert chain([1, 2, 3, 4]) == chain([1, 2, 3, 4, 5]), "only full blocks"
    assert chain([1, 23])[0] != chain([12, 3])[0]
    assert chain([9, 9, 3, 4])[1] != chain([1, 2, 3, 4])[1], "a block's hash covers what precedes it"
    assert chain([1, 2], "x")[0] != chain([1, 2])[0] != chain([1, 2], "")[0]
    assert chain_root(cache_salt="x") != chain_root(adapter="x")
    assert len(chain([1, 2])[0]) == 32
