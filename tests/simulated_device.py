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
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView, score_words


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


def expected_scores(prompt: Sequence[int], vocab_size: int) -> list[tuple[float, int]]:
    """(log-probability, first alternative) of each prompt token but the first."""
    return [score(prompt[:i], prompt[i], vocab_size) for i in range(1, len(prompt))]


def score(context: Sequence[int], token: int, vocab_size: int) -> tuple[float, int]:
    value = zlib.crc32(np.asarray([*context, token], "<i4").tobytes())
    return -(value % 4096) / 256, value % vocab_size


def expected_embedding(prompt: Sequence[int], size: int) -> list[float]:
    return [float(next_token(prompt, i, 1000) + 1) for i in range(size)]


class SimulatedDevice:
    def __init__(self, table: BatchTable, num_blocks: int, vocab_size: int, embedding_size: int = 4) -> None:
        self.table = table
        self.embedding_size = embedding_size
        self.vocab_size = vocab_size
        self.block_size = table.shape.block_size
        self.kv = np.full((num_blocks * self.block_size, 2), -1, np.int64)
        self.block_table = np.full((table.shape.num_rows, table.shape.max_blocks), -1, np.int64)
        self.generation = np.full(table.shape.num_rows, -1, np.int64)
        self.last_token = np.full(table.shape.num_rows, -1, np.int64)
        self.position = np.full(table.shape.num_rows, -1, np.int64)
        """Of the last token drawn: under speculation only the device knows it."""
        self.num_accepted_drafts = 0
        self.num_steps = 0

    def run(self, step: StepInputView, output: StepOutputView) -> None:
        num_rows, num_decode, num_appends, num_tokens = step.header[:4].tolist()
        self.num_steps += 1
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
        num_draft = int(step.num_draft[entry])
        if StepFlag.LAST_TOKEN in flags:
            assert entry < self.decode_entries and count == 1 + num_draft
            if StepFlag.UPPER_BOUND in flags:
                assert start >= self.position[row], "the bound on the first position is too low"
                start = int(self.position[row])
            assert start == self.position[row]
            if start >= self.table.limit[row] - 1:
                return  # the step that reached the limit is not back yet
            tokens = [int(self.last_token[row]), *self._drafts(row, start, num_draft)]
        else:
            tokens = self.table.token_ids[row, start : start + count].tolist()
        for position, token in enumerate(tokens, start):
            self.kv[self._slot(row, position)] = (token, position)
        output.num_accepted[entry] = 0
        if StepFlag.SCORE in flags:
            output.add_report(entry, self._scores(row, start, start + count))
        if StepFlag.EMBED in flags:
            context = self._context(row, start + count)
            embedding = np.array(expected_embedding(context, self.embedding_size), np.float32)
            output.add_report(entry, embedding.view(np.int32))
        if StepFlag.LAST_TOKEN in flags:
            self._verify(output, entry, row, start, tokens)
        elif StepFlag.SAMPLE in flags:
            self._draw(output, entry, 0, row, start + count)

    def _drafts(self, row: int, position: int, most: int) -> list[int]:
        """As many drafts as the limit leaves room for, and as luck will have it; right up to a place, then wrong."""
        luck = zlib.crc32(f"{self.num_steps}/{row}".encode())
        num = min(most, int(self.table.limit[row]) - 2 - position, luck % (most + 1))
        context = [*self._context(row, position), int(self.last_token[row])]
        for place in range(num):
            token = next_token(context, int(self.table.seed[row]), self.vocab_size)
            context.append((token + (place >= luck // 16 % (num + 1))) % self.vocab_size)
        return context[position + 1 :]

    def _verify(self, output: StepOutputView, entry: int, row: int, start: int, tokens: list[int]) -> None:
        output.num_draft[entry] = len(tokens) - 1
        for place in range(len(tokens)):
            self._draw(output, entry, place, row, start + 1 + place)
            if place + 1 < len(tokens) and output.tokens[entry, place] != tokens[place + 1]:
                break
            self.num_accepted_drafts += place + 1 < len(tokens)

    def _draw(self, output: StepOutputView, entry: int, place: int, row: int, length: int) -> None:
        token = next_token(self._context(row, length), int(self.table.seed[row]), self.vocab_size)
        self.last_token[row] = output.tokens[entry, place] = token
        self.position[row] = length
        output.num_accepted[entry] += 1

    def _scores(self, row: int, start: int, end: int) -> np.ndarray:
        """Records for the tokens behind positions start .. end, as far as the prompt goes."""
        last = min(end, int(self.table.num_prompt[row]) - 1)
        num_top = int(self.table.prompt_logprobs[row])
        context = self._context(row, end)
        records = np.zeros((last - start, score_words(num_top)), np.int32)
        for position in range(start, last):
            token = int(self.table.token_ids[row, position + 1])
            logprob, first = score(context[: position + 1], token, self.vocab_size)
            record = records[position - start]
            record[0], record[1] = np.float32(logprob).view(np.int32), position + 1
            record[2 : 2 + num_top] = (first + np.arange(num_top)) % self.vocab_size
            record[2 + num_top :] = np.full(num_top, logprob, np.float32).view(np.int32)
        return records.reshape(-1)

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
