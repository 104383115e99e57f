"""A device that computes nothing but remembers everything: the scheduler's other half, made obviously right.

It keeps, for each KV slot, the token that was written there and its position, and draws the next token as a hash of
the whole context as read back through the block table. A wrong block, a reused block, a stale entry or a lost append
therefore changes the tokens, and the oracle (`expected_tokens`) knows which ones are right from the prompt alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView


def next_token(context: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token that follows `context`, for this and every other correct device."""
    data = np.asarray(context, "<i4").tobytes()
    return zlib.crc32(data, seed & 0xFFFFFFFF) % vocab_size


def expected_tokens(
    prompt: Sequence[int], seed: int, vocab_size: int, max_tokens: int, stop_token_ids: Sequence[int] = ()
) -> list[int]:
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, seed, vocab_size))
        if context[-1] in stop_token_ids:
            break
    return context[len(prompt) :]


class SimulatedDevice:
    def __init__(self, table: BatchTable, num_blocks: int, vocab_size: int) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.block_size = table.shape.block_size
        self.kv = np.full((num_blocks * self.block_size, 2), -1, np.int64)
        self.block_table = np.full((table.shape.num_rows, table.shape.max_blocks), -1, np.int64)
        self.generation = np.full(table.shape.num_rows, -1, np.int64)
        self.last_token = np.full(table.shape.num_rows, -1, np.int64)

    def run(self, step: StepInputView, output: StepOutputView) -> None:
        num_rows, num_decode, num_appends, num_tokens = step.header[:4].tolist()
        assert num_tokens == int(step.num_tokens[:num_rows].sum())
        assert len(set(step.rows[:num_rows].tolist())) == num_rows, "a row stands in a step twice"
        self.decode_entries = num_decode
        for entry in np.flatnonzero(step.flags[:num_rows] & StepFlag.NEW).tolist():
            self._admit(int(step.rows[entry]), int(step.generation[entry]))
        # After the new rows, as a worker does it: an append of an ended admission would spoil the row's next one.
        appended = step.append_rows[:num_appends], step.append_index[:num_appends]
        self.block_table[appended] = step.append_blocks[:num_appends]
        output.answer(step)
        for entry in range(num_rows):
            self._run_entry(step, output, entry)

    def _run_entry(self, step: StepInputView, output: StepOutputView, entry: int) -> None:
        row, start, count = int(step.rows[entry]), int(step.start[entry]), int(step.num_tokens[entry])
        flags = StepFlag(int(step.flags[entry]))
        assert self.generation[row] == step.generation[entry], "a row was used under a generation it was not begun with"
        if StepFlag.LAST_TOKEN in flags:
            assert entry < self.decode_entries and count == 1
            tokens = [int(self.last_token[row])]
        else:
            tokens = self.table.token_ids[row, start : start + count].tolist()
        for position, token in enumerate(tokens, start):
            self.kv[self._slot(row, position)] = (token, position)
        output.num_accepted[entry] = 0
        if StepFlag.SAMPLE in flags:
            token = next_token(self._context(row, start + count), int(self.table.seed[row]), self.vocab_size)
            self.last_token[row] = output.tokens[entry, 0] = token
            output.num_accepted[entry] = 1

    def _admit(self, row: int, generation: int) -> None:
        blocks = int(self.table.num_blocks[row])
        self.block_table[row] = -1
        self.block_table[row, :blocks] = self.table.block_table[row, :blocks]
        self.generation[row] = generation

    def _slot(self, row: int, position: int) -> int:
        block = int(self.block_table[row, position // self.block_size])
        assert block >= 0, "a position was computed in a block that the row does not have"
        return block * self.block_size + position % self.block_size

    def _context(self, row: int, length: int) -> list[int]:
        slots = [self._slot(row, position) for position in range(length)]
        tokens, positions = self.kv[slots, 0], self.kv[slots, 1]
        assert np.array_equal(positions, np.arange(length)), "a block holds another sequence's positions"
        return tokens.tolist()
