"""The records on the rings: the only place where their bytes get a meaning.

The hot path is flat int32 sections at fixed offsets, so that a step is written and read as array slices through
views that are made once per slot. Rare control messages are msgspec msgpack. Nothing is ever pickled.

StepInput (engine → every worker of the replica), sections of int32, each starting on a cache line:

    header      16 words   num_rows, num_decode, num_appends, num_tokens
    rows        [R]        batch-table row of each entry; the first num_decode entries are plain decode rows
    generation  [R]        the admission the entry belongs to
    start       [R]        first position computed; an upper bound where the flags say so
    num_tokens  [R]        positions computed, at most, where drafts are among them
    num_draft   [R]        drafts that may be among them: the worker makes them, and knows how many there are
    flags       [R]        StepFlag bits
    append_rows, append_index, append_blocks  [A]  block table [row, index] = block, for rows that are not new

StepOutput (sampling rank → engine), entries in the order of the StepInput's rows:

    header       16 words  num_rows, num_logprobs; words 8..15 hold four int64: device times in ns
    rows         [R]
    generation   [R]
    num_accepted [R]       tokens drawn for the entry, accepted drafts included: 0 for a chunk that does not reach the
                           prompt's end and for a row that has reached its limit, NON_FINITE, NO_MATCH or
                           NO_TOKEN when nothing could be drawn
    num_draft    [R]       drafts that were verified for the entry; written only when max_draft > 0
    tokens       [R, 1 + max_draft]
    logprob      [P]       float32, of the drawn token
    rank         [P]
    top_ids      [P, MAX_LOGPROBS]
    top_logprobs [P, MAX_LOGPROBS]  float32
    num_reported [R]       words of `report` that belong to the entry; valid when the header's NUM_REPORTED is not 0
    report       [REPORT_WORDS]  what entries report of their prompts, one behind the other in the entries' order:
                           of a SCORE entry, for each position computed that another prompt token follows, that
                           token's log-probability (float32), its rank, k ids and k log-probabilities (float32);
                           of an EMBED entry, the last position's normed hidden state (float32). An entry that draws
                           nothing and whose report is not finite says so by num_accepted NON_FINITE.

R is max_num_seqs, A is the most block appends that one step can need, and P is R * (1 + max_draft) places: place
entry * (1 + max_draft) + i belongs to tokens[entry, i]. VERSION in layout.py changes with this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipring.shm.layout import align
from slipring.shm.params import MAX_LOGPROBS

Int32Array = NDArray[np.int32]
HEADER_WORDS = 16
REPORT_WORDS = 16384
"""What all entries of one step may report; the scheduler cuts chunks by it."""

NON_FINITE = -1
"""`num_accepted` of an entry whose logits held NaN or no finite maximum: the request cannot go on."""
NO_MATCH = -2
"""`num_accepted` of an entry whose grammar could not be followed any further: likewise."""
NO_TOKEN = -3
"""`num_accepted` of an entry whose logits were finite, and whose restrictions left none of them: likewise."""


class SlotKind(IntEnum):
    """What a ring slot holds."""

    STEP = 1
    READY = 2
    ERROR = 3
    SHUTDOWN = 4
    PROGRESS = 5


class StepFlag(IntFlag):
    """Per-entry bits of a StepInput."""

    NEW = 1
    """First step of this admission: read tokens, block table and sampling columns from the batch table."""
    SAMPLE = 2
    """Draw a token after the last position."""
    LAST_TOKEN = 4
    """The input is the row's last drawn token, which the worker knows (decode), and drafts, which it makes."""
    UPPER_BOUND = 8
    """`start` is an upper bound: a step in flight may accept fewer drafts than it may hold. The worker knows."""
    SCORE = 16
    """Report the log-probabilities of the prompt's tokens that follow the positions of this chunk."""
    EMBED = 32
    """Report the hidden state of the last position."""


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's last word of start-up."""

    epoch: int = 0
    """The one that it was told; `Link` writes it."""
    num_blocks: int
    block_bytes: int
    """Bytes of KV for one block over all layers of this worker, drafts' included."""
    phase_seconds: dict[str, float]
    """How long each start-up phase took, in order."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Weights loaded so far, in bytes of the checkpoint."""

    done: int
    total: int


class WorkerError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a worker gives up: the exception in words."""

    message: str
    traceback: str
    step_id: int | None = None


def encode(message: Ready | Progress | WorkerError) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(payload: memoryview, length: int, kind: type[Any]) -> Any:
    """Raises msgspec.DecodeError on a protocol fault."""
    return msgspec.msgpack.decode(payload[:length], type=kind)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The capacities both sides agree on; all offsets follow from them."""

    max_rows: int
    """R: max_num_seqs."""
    max_appends: int
    """A: block appends that one step can need."""
    max_draft: int = 0

    @classmethod
    def of(cls, max_num_seqs: int, max_draft: int, block_size: int) -> StepShape:
        """Each row may cross (1 + max_draft) / block_size block borders, rounded up, in one step."""
        per_row = -(-(1 + max_draft) // block_size)
        return cls(max_num_seqs, max_num_seqs * per_row, max_draft)

    @property
    def input_bytes(self) -> int:
        return align(HEADER_WORDS * 4) + 6 * align(self.max_rows * 4) + 3 * align(self.max_appends * 4)

    @property
    def output_bytes(self) -> int:
        per_row = align(self.max_rows * 4)
        per_place = align(self.num_places * 4)
        top = align(self.num_places * MAX_LOGPROBS * 4)
        report = per_row + align(REPORT_WORDS * 4)
        return align(HEADER_WORDS * 4) + 4 * per_row + 3 * per_place + 2 * top + report

    @property
    def num_places(self) -> int:
        """P: tokens that one step can return."""
        return self.max_rows * (1 + self.max_draft)


class _Cursor:
    """Hands out consecutive, line-aligned array views of a payload."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._offset = 0

    def take(self, shape: tuple[int, ...], dtype: type[np.generic] = np.int32) -> NDArray[Any]:
        count = int(np.prod(shape))
        view = np.frombuffer(self._payload, dtype=dtype, count=count, offset=self._offset).reshape(shape)
        self._offset += align(count * view.itemsize)
        return view


class StepInputView:
    """Arrays over one slot's payload. Bound once per slot; filled or read each time the slot comes round."""

    __slots__ = (
        "append_blocks",
        "append_index",
        "append_rows",
        "flags",
        "generation",
        "header",
        "num_draft",
        "num_tokens",
        "rows",
        "start",
    )

    NUM_ROWS, NUM_DECODE, NUM_APPENDS, NUM_TOKENS = range(4)

    def __init__(self, payload: memoryview, shape: StepShape) -> None:
        cursor = _Cursor(payload)
        rows = (shape.max_rows,)
        self.header: Int32Array = cursor.take((HEADER_WORDS,))
        self.rows: Int32Array = cursor.take(rows)
        self.generation: Int32Array = cursor.take(rows)
        self.start: Int32Array = cursor.take(rows)
        self.num_tokens: Int32Array = cursor.take(rows)
        self.num_draft: Int32Array = cursor.take(rows)
        self.flags: Int32Array = cursor.take(rows)
        self.append_rows: Int32Array = cursor.take((shape.max_appends,))
        self.append_index: Int32Array = cursor.take((shape.max_appends,))
        self.append_blocks: Int32Array = cursor.take((shape.max_appends,))


class StepOutputView:
    """Arrays over one slot's payload of the output ring."""

    __slots__ = (
        "generation",
        "header",
        "logprob",
        "num_accepted",
        "num_draft",
        "num_reported",
        "rank",
        "report",
        "rows",
        "times_ns",
        "tokens",
        "top_ids",
        "top_logprobs",
    )

    NUM_ROWS, NUM_LOGPROBS, NUM_REPORTED = range(3)
    PICKED_UP, FORWARD, SAMPLE, PUBLISHED = range(4)
    """Indices into `times_ns`: monotonic time of pick-up, then durations of forward pass and sampling, then the
    monotonic time of publication."""

    def __init__(self, payload: memoryview, shape: StepShape) -> None:
        cursor = _Cursor(payload)
        rows = (shape.max_rows,)
        self.header: Int32Array = cursor.take((HEADER_WORDS,))
        self.times_ns: NDArray[np.int64] = self.header[8:].view(np.int64)
        self.rows: Int32Array = cursor.take(rows)
        self.generation: Int32Array = cursor.take(rows)
        self.num_accepted: Int32Array = cursor.take(rows)
        self.num_draft: Int32Array = cursor.take(rows)
        self.tokens: Int32Array = cursor.take((shape.max_rows, 1 + shape.max_draft))
        places = (shape.num_places,)
        self.logprob: NDArray[np.float32] = cursor.take(places, np.float32)
        self.rank: Int32Array = cursor.take(places)
        self.top_ids: Int32Array = cursor.take((*places, MAX_LOGPROBS))
        self.top_logprobs: NDArray[np.float32] = cursor.take((*places, MAX_LOGPROBS), np.float32)
        self.num_reported: Int32Array = cursor.take(rows)
        self.report: Int32Array = cursor.take((REPORT_WORDS,))

    def failure(self, place: int) -> int:
        """NON_FINITE, NO_MATCH or NO_TOKEN, of an entry that failed at this place."""
        return int(self.num_accepted[place // self.tokens.shape[1]])

    def answer(self, step: StepInputView) -> int:
        """Begin the answer to a step: echo its rows and generations, with nothing drawn yet. Returns their number."""
        num_rows = int(step.header[step.NUM_ROWS])
        self.header[self.NUM_ROWS] = num_rows
        self.header[self.NUM_LOGPROBS] = -1
        self.header[self.NUM_REPORTED] = 0
        self.rows[:num_rows] = step.rows[:num_rows]
        self.generation[:num_rows] = step.generation[:num_rows]
        self.num_accepted[:num_rows] = 0
        return num_rows

    def add_report(self, entry: int, words: Int32Array) -> None:
        """Append what `entry` reports; entries in their order."""
        begin = int(self.header[self.NUM_REPORTED])
        if begin == 0:
            self.num_reported[: self.header[self.NUM_ROWS]] = 0
        self.report[begin : begin + len(words)] = words
        self.num_reported[entry] = len(words)
        self.header[self.NUM_REPORTED] = begin + len(words)

    def report_of(self, entry: int) -> Int32Array:
        """What `entry` reported, as a view of the slot."""
        if self.header[self.NUM_REPORTED] == 0:
            return self.report[:0]
        begin = int(self.num_reported[:entry].sum())
        return self.report[begin : begin + int(self.num_reported[entry])]


def score_words(num_alternatives: int) -> int:
    """Words in which a SCORE entry reports one prompt token."""
    return 2 + 2 * num_alternatives
