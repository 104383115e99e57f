"""The exchange of device memory handles between the ranks of a replica, and the order in which mappings may end.

    0     ┌────────────────────────────────────────────────────────────────────────┐
          │ magic u64 │ version u64 │ num_ranks u64 │ epoch u64 │ 0 ...            │  header: the creator, once
    64    ├────────────────────────────────────────────────────────────────────────┤
          │ state u64 │ pid u64 │ nbytes u64 │ handle_length u64 │ 0 ...           │  rank 0's words
    128   │ handle, up to 64 bytes                                                 │  rank 0's handle
    192   ├────────────────────────────────────────────────────────────────────────┤
          │ ... two 64-byte lines a rank                                           │
          └────────────────────────────────────────────────────────────────────────┘

| word          | writer    | readers      | meaning                                                               |
|---------------|-----------|--------------|-----------------------------------------------------------------------|
| header        | creator   | every rank   | the replica's epoch; a segment serves one, and is never used again    |
| state         | that rank | all, creator | a `HandleState`; only grows                                           |
| pid           | that rank | diagnostics  | whose memory it is                                                    |
| nbytes        | that rank | every rank   | size of the buffer behind the handle; the same for all                |
| handle        | that rank | every rank   | opaque here (CUDA IPC: 64 bytes); stable from EXPORTED on             |

Memory that a peer has mapped must not be freed: CUDA leaves that undefined. UNMAPPED is a rank's promise that it has
closed every peer's handle and opens none any more, whether it ever mapped them or not; an owner frees when all living
ranks have given it. Who is alive only the caller knows. A killed rank keeps nothing mapped, and its own buffer goes
with its process, so survivors may unmap it whenever they like.

Nothing blocks: `handles` and `waiting_for` answer at once. No file descriptor or handle outlives the segment's epoch.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import IntEnum

from slipring.shm.layout import LINE, WORD, WORDS_PER_LINE
from slipring.shm.segment import Segment

MAGIC = 0x534C4950_48414E44  # "SLIPHAND"
VERSION = 1
HANDLE_BYTES = LINE
H_MAGIC, H_VERSION, H_NUM_RANKS, H_EPOCH = range(4)
R_STATE, R_PID, R_NBYTES, R_HANDLE_LENGTH = range(4)
_RECORD_BYTES = 2 * LINE


class HandleState(IntEnum):
    """How far a rank is."""

    EMPTY = 0
    EXPORTED = 1
    """Its buffer is zeroed and its handle can be opened."""
    MAPPED = 2
    """It has opened every peer's handle."""
    UNMAPPED = 3
    """It has closed them, or never opened them, and opens none again."""


def exchange_bytes(num_ranks: int) -> int:
    return LINE + num_ranks * _RECORD_BYTES


class HandleExchange:
    """One segment's records, as the creator (`create`) or as a rank (`attach`) sees them."""

    def __init__(self, segment: Segment, rank: int | None) -> None:
        words = segment.buf.cast("Q")
        if words[H_MAGIC] != MAGIC or words[H_VERSION] != VERSION:
            raise ValueError(f"not a handle exchange of version {VERSION}")
        self.num_ranks: int = words[H_NUM_RANKS]
        self.epoch: int = words[H_EPOCH]
        self.rank = rank
        if exchange_bytes(self.num_ranks) > segment.nbytes:
            raise ValueError("handle exchange is larger than its segment")
        if rank is not None and not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} of {self.num_ranks}")
        starts = [LINE + index * _RECORD_BYTES for index in range(self.num_ranks)]
        self._words = [words[start // WORD : start // WORD + WORDS_PER_LINE] for start in starts]
        self._handles = [segment.buf[start + LINE : start + _RECORD_BYTES] for start in starts]

    @classmethod
    def create(cls, segment: Segment, num_ranks: int, epoch: int) -> HandleExchange:
        """Write the header into a zeroed segment of at least `exchange_bytes(num_ranks)`."""
        words = segment.buf.cast("Q")
        words[H_VERSION], words[H_NUM_RANKS], words[H_EPOCH] = VERSION, num_ranks, epoch
        words[H_MAGIC] = MAGIC
        return cls(segment, None)

    @classmethod
    def attach(cls, segment: Segment, rank: int, epoch: int) -> HandleExchange:
        """Raises ValueError for a segment of another epoch: its handles may name memory that was given back."""
        exchange = cls(segment, rank)
        if exchange.epoch != epoch:
            raise ValueError(f"handle exchange of epoch {exchange.epoch}, expected {epoch}")
        return exchange

    def export(self, handle: bytes, nbytes: int) -> None:
        """Offer this rank's buffer. Raises ValueError for a handle that is empty or too long, or a second offer."""
        words = self._own()
        if words[R_STATE] != HandleState.EMPTY:
            raise ValueError(f"rank {self.rank} has exported already")
        if not 0 < len(handle) <= HANDLE_BYTES:
            raise ValueError(f"a handle has 1 to {HANDLE_BYTES} bytes, not {len(handle)}")
        self._handles[self._rank()][: len(handle)] = handle
        words[R_PID], words[R_NBYTES], words[R_HANDLE_LENGTH] = os.getpid(), nbytes, len(handle)
        words[R_STATE] = HandleState.EXPORTED  # SYNC: a handle is complete before its state says so

    def handles(self) -> tuple[bytes, ...] | None:
        """Every rank's handle, or None until all are there.

        Raises ValueError when buffers differ in size, or when a rank has already left the epoch.
        """
        states = self.states()  # SYNC: a handle is complete before its state says so
        if HandleState.EMPTY in states:
            return None
        if HandleState.UNMAPPED in states:
            raise ValueError(f"rank {states.index(HandleState.UNMAPPED)} has left epoch {self.epoch}")
        if len(sizes := {words[R_NBYTES] for words in self._words}) > 1:
            raise ValueError(f"ranks exported buffers of different sizes: {sorted(sizes)}")
        return tuple(
            bytes(handle[: words[R_HANDLE_LENGTH]])
            for words, handle in zip(self._words, self._handles, strict=True)
        )  # fmt: skip

    def mapped(self) -> None:
        """This rank has opened every peer's handle."""
        self._advance(HandleState.MAPPED)

    def unmapped(self) -> None:
        """This rank has closed every peer's handle and opens none again. To be said on every way out."""
        self._advance(HandleState.UNMAPPED)  # SYNC: handles are closed before an owner frees its memory

    def waiting_for(self, state: HandleState, dead: Collection[int] = ()) -> tuple[int, ...]:
        """Living ranks that have not reached `state`. For UNMAPPED an empty answer means: free your own buffer."""
        # SYNC: handles are closed before an owner frees its memory
        return tuple(rank for rank, reached in enumerate(self.states()) if reached < state and rank not in dead)

    def states(self) -> list[HandleState]:
        return [HandleState(words[R_STATE]) for words in self._words]

    def pid(self, rank: int) -> int:
        """0 until the rank has exported."""
        return self._words[rank][R_PID]

    def _advance(self, state: HandleState) -> None:
        words = self._own()
        if words[R_STATE] > state:
            raise ValueError(f"rank {self.rank} is {HandleState(words[R_STATE]).name} and cannot be {state.name} again")
        words[R_STATE] = state

    def _own(self) -> memoryview:
        return self._words[self._rank()]

    def _rank(self) -> int:
        if self.rank is None:
            raise ValueError("the creator is no rank")
        return self.rank
