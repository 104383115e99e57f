"""The batch table: one row per live admission, structure-of-arrays, in shared memory.

The scheduler is the only writer, its workers are readers. A row belongs to one admission of one request: `end`,
abort and preemption end it, and a readmission takes another row. A worker reads a row's tokens, blocks and sampling
columns in the step that carries the entry's NEW flag (tokens also in later chunks of its prompt) and keeps what it
needs; it compares generations with the StepInput, never with the column here, which may have moved on.

| column                 | shape                      | written                                                    |
|------------------------|----------------------------|------------------------------------------------------------|
| token_ids              | [num_rows, max_model_len]  | prompt and outputs so far at admission; outputs as learned |
| block_table            | [num_rows, max_blocks]     | at admission; then append-only                             |
| generation             | [num_rows]                 | bumped when the row is handed out and when it ends         |
| num_prompt, num_known  | [num_rows]                 | at admission: prompt length; prompt plus outputs so far    |
| limit                  | [num_rows]                 | at admission: length at which the request ends             |
| num_blocks             | [num_rows]                 | at admission: entries of block_table that are valid        |
| sampling columns       | [num_rows] (some [.., k])  | at admission                                               |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipring.shm.layout import align
from slipring.shm.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from slipring.shm.segment import Segment

WORD_END = -1
"""No token: follows each sequence of the `bad_words` column."""


@dataclass(frozen=True, slots=True)
class TableShape:
    num_rows: int
    max_model_len: int
    block_size: int

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def columns(self) -> list[tuple[str, type[np.generic], tuple[int, ...]]]:
        """(name, dtype, shape) in the order in which they lie in the segment."""
        rows = (self.num_rows,)
        return [
            ("token_ids", np.int32, (self.num_rows, self.max_model_len)),
            ("block_table", np.int32, (self.num_rows, self.max_blocks)),
            ("generation", np.int32, rows),
            ("num_prompt", np.int32, rows),
            ("num_known", np.int32, rows),
            ("limit", np.int32, rows),
            ("num_blocks", np.int32, rows),
            ("temperature", np.float32, rows),
            ("top_p", np.float32, rows),
            ("top_k", np.int32, rows),
            ("min_p", np.float32, rows),
            ("presence_penalty", np.float32, rows),
            ("frequency_penalty", np.float32, rows),
            ("repetition_penalty", np.float32, rows),
            ("seed", np.uint64, rows),
            ("choice", np.int32, rows),
            ("min_tokens", np.int32, rows),
            ("grammar", np.int32, rows),
            ("logprobs", np.int32, rows),
            ("num_stop_ids", np.int32, rows),
            ("stop_ids", np.int32, (self.num_rows, MAX_STOP_TOKEN_IDS)),
            ("num_bias", np.int32, rows),
            ("bias_ids", np.int32, (self.num_rows, MAX_LOGIT_BIAS)),
            ("bias_values", np.float32, (self.num_rows, MAX_LOGIT_BIAS)),
            ("prompt_logprobs", np.int32, rows),
            ("num_allowed", np.int32, rows),
            ("allowed_ids", np.int32, (self.num_rows, MAX_ALLOWED_TOKEN_IDS)),
            ("num_bad_words", np.int32, rows),
            ("bad_words", np.int32, (self.num_rows, MAX_BAD_WORD_TOKENS)),
        ]

    @property
    def nbytes(self) -> int:
        return sum(align(math.prod(shape) * np.dtype(dtype).itemsize) for _, dtype, shape in self.columns())


class BatchTable:
    """Views over the segment; the same class on both sides."""

    token_ids: NDArray[np.int32]
    block_table: NDArray[np.int32]
    generation: NDArray[np.int32]
    num_prompt: NDArray[np.int32]
    num_known: NDArray[np.int32]
    limit: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    min_p: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    repetition_penalty: NDArray[np.float32]
    seed: NDArray[np.uint64]
    choice: NDArray[np.int32]
    min_tokens: NDArray[np.int32]
    grammar: NDArray[np.int32]
    logprobs: NDArray[np.int32]
    num_stop_ids: NDArray[np.int32]
    stop_ids: NDArray[np.int32]
    num_bias: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    prompt_logprobs: NDArray[np.int32]
    num_allowed: NDArray[np.int32]
    allowed_ids: NDArray[np.int32]
    num_bad_words: NDArray[np.int32]
    """Entries of `bad_words` in use: token sequences, each with WORD_END behind it."""
    bad_words: NDArray[np.int32]

    def __init__(self, segment: Segment, shape: TableShape) -> None:
        self.segment = segment
        self.shape = shape
        offset = 0
        for name, dtype, dims in shape.columns():
            count = math.prod(dims)
            view = np.frombuffer(segment.buf, dtype=dtype, count=count, offset=offset).reshape(dims)
            setattr(self, name, view)
            offset += align(view.nbytes)

    @classmethod
    def create(cls, shape: TableShape) -> BatchTable:
        """Raises OSError when shared memory is short."""
        return cls(Segment.create("batch table", shape.nbytes), shape)

    def write_params(self, row: int, params: SamplingParams) -> None:
        """Fill the sampling columns of a row that is about to be handed out.

        Raises ValueError when a list is longer than its column (the edge refuses those; this is the backstop).
        """
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.min_p[row] = params.min_p
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.seed[row] = params.seed
        self.choice[row] = params.choice
        self.min_tokens[row] = params.min_tokens
        self.grammar[row] = params.grammar
        self.logprobs[row] = params.logprobs
        self.num_stop_ids[row] = _fill(self.stop_ids[row], params.stop_token_ids)
        self.num_bias[row] = _fill(self.bias_ids[row], [token for token, _ in params.logit_bias])
        _fill(self.bias_values[row], [bias for _, bias in params.logit_bias])
        self.prompt_logprobs[row] = params.prompt_logprobs
        self.num_allowed[row] = _fill(self.allowed_ids[row], params.allowed_token_ids)
        self.num_bad_words[row] = _fill(self.bad_words[row], flatten_words(params.bad_words))


def flatten_words(words: Sequence[Sequence[int]]) -> list[int]:
    """Token sequences as the `bad_words` column holds them."""
    return [token for word in words for token in (*word, WORD_END)]


def _fill(column: NDArray[np.generic], values: Sequence[float]) -> int:
    count = len(values)
    if count > len(column):
        raise ValueError(f"{count} entries, room for {len(column)}")
    if count:
        column[:count] = values
    return count
