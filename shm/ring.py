"""A ring of fixed slots in shared memory: one writer, any number of readers that each see every slot.

Nothing here blocks, sleeps or raises on a full or empty ring: `try_claim` and `try_read` return None at once, and
waiting is a strategy beside the ring (`doorbell.py`). The layout is drawn in `layout.py`.

Writer:  slot = ring.try_claim()  →  fill ring.payload(slot)  →  ring.publish(kind, length, step_id)
Reader:  slot = ring.try_read()   →  use ring.payload(slot)   →  ring.advance()

A reader may look ahead (`try_read(1)` is the slot after the next one) and advances only when nothing of the slot
is needed any more; until then the writer cannot reuse it.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass

from slipring.shm import layout as at
from slipring.shm.layout import Phase
from slipring.shm.segment import Segment

# Plain stores stay in order on x86-64. Elsewhere the doorbell's system call is the barrier, and nobody may spin.
MAY_SPIN = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True, slots=True)
class ReaderState:
    """What a reader last said of itself."""

    index: int
    pid: int
    read: int
    heartbeat_ns: int
    phase: Phase


class Ring:
    """Shared geometry and views; use `RingWriter` or `RingReader`."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._words = words = segment.buf.cast("Q")
        if words[at.H_MAGIC] != at.MAGIC or words[at.H_VERSION] != at.VERSION:
            raise ValueError(f"not a slipring ring of version {at.VERSION}")
        self.num_slots: int = words[at.H_NUM_SLOTS]
        self.num_readers: int = words[at.H_NUM_READERS]
        self.slot_bytes: int = words[at.H_SLOT_BYTES]
        first = at.slots_at(self.num_readers)
        if first + self.num_slots * self.slot_bytes > segment.nbytes:
            raise ValueError("ring is larger than its segment")
        offsets = [first + i * self.slot_bytes for i in range(self.num_slots)]
        assert all(offset % at.LINE == 0 for offset in offsets)
        self._headers = [words[o // at.WORD : o // at.WORD + at.WORDS_PER_LINE] for o in offsets]
        self._payloads = [segment.buf[o + at.LINE : o + self.slot_bytes] for o in offsets]
        self._writer = words[at.WRITER_AT : at.WRITER_AT + at.WORDS_PER_LINE]
        self._readers = [
            words[start : start + at.WORDS_PER_LINE]
            for start in range(at.READERS_AT, at.READERS_AT + self.num_readers * at.WORDS_PER_LINE, at.WORDS_PER_LINE)
        ]

    def payload(self, slot: int) -> memoryview:
        """The slot's payload, 64-byte aligned. `slot` is what `try_claim` or `try_read` returned."""
        return self._payloads[slot]

    def header(self, slot: int) -> tuple[int, int, int, int]:
        """(kind, length, step_id, publish_ns) of a slot that was read."""
        words = self._headers[slot]
        return words[at.S_KIND], words[at.S_LENGTH], words[at.S_STEP_ID], words[at.S_PUBLISH_NS]

    def reader_state(self, index: int) -> ReaderState:
        line = self._readers[index]
        return ReaderState(index, line[at.R_PID], line[at.R_READ], line[at.R_HEARTBEAT], Phase(line[at.R_PHASE]))

    @property
    def published(self) -> int:
        """Slots published since creation."""
        return self._writer[at.W_PUBLISHED]


class RingWriter(Ring):
    """The one party that publishes. The creator of the segment, or the process it was handed to."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._writer[at.W_PID] = os.getpid()
        self._sequence: int = self._writer[at.W_PUBLISHED]
        self._slowest = min(line[at.R_READ] for line in self._readers)

    @classmethod
    def create(cls, label: str, num_slots: int, payload_bytes: int, num_readers: int) -> RingWriter:
        """Make segment and ring. Raises OSError when memory is short."""
        return cls(create_ring(label, num_slots, payload_bytes, num_readers))

    def try_claim(self) -> int | None:
        """The next slot to fill, or None while the slowest reader still holds it. Claiming twice is harmless."""
        if self._sequence - self._slowest >= self.num_slots:
            # SYNC: a reader's cursor passed the slot, so nobody reads it any more
            self._slowest = min(line[at.R_READ] for line in self._readers)
            if self._sequence - self._slowest >= self.num_slots:
                return None
        return self._sequence % self.num_slots

    def publish(self, kind: int, length: int, step_id: int) -> None:
        """Make the claimed slot visible to every reader."""
        sequence = self._sequence
        header = self._headers[sequence % self.num_slots]
        header[at.S_SEQUENCE] = sequence
        header[at.S_KIND] = kind
        header[at.S_LENGTH] = length
        header[at.S_STEP_ID] = step_id
        header[at.S_PUBLISH_NS] = time.monotonic_ns()
        self._sequence = sequence = sequence + 1
        # SYNC: header and payload of every slot below `published` are complete
        self._writer[at.W_PUBLISHED] = sequence

    def lagging(self) -> list[ReaderState]:
        """The readers that keep the ring from moving on: who, in which phase, silent since when."""
        states = [self.reader_state(i) for i in range(self.num_readers)]
        slowest = min(state.read for state in states)
        return [state for state in states if state.read == slowest]


class RingReader(Ring):
    """One of the parties that follow the writer."""

    def __init__(self, segment: Segment, index: int = 0) -> None:
        super().__init__(segment)
        self.index = index
        self._line = self._readers[index]
        self._line[at.R_PID] = os.getpid()
        self._sequence: int = self._line[at.R_READ]
        self.beat(Phase.STARTING)

    def try_read(self, ahead: int = 0) -> int | None:
        """The next slot (or the one `ahead` slots after it) if it is published, else None."""
        # SYNC: header and payload of every slot below `published` are complete
        if self._sequence + ahead >= self._writer[at.W_PUBLISHED]:
            return None
        slot = (self._sequence + ahead) % self.num_slots
        assert self._headers[slot][at.S_SEQUENCE] == self._sequence + ahead, "the writer overran this reader"
        return slot

    def advance(self) -> None:
        """Give the oldest slot back to the writer."""
        self._sequence = sequence = self._sequence + 1
        # SYNC: a reader's cursor passed the slot, so nobody reads it any more
        self._line[at.R_READ] = sequence

    def beat(self, phase: Phase) -> None:
        """Say that this reader is alive, and what it is doing."""
        self._line[at.R_PHASE] = int(phase)
        self._line[at.R_HEARTBEAT] = time.monotonic_ns()


def create_ring(label: str, num_slots: int, payload_bytes: int, num_readers: int) -> Segment:
    """A segment that holds an empty ring. Raises OSError when memory is short."""
    segment = Segment.create(label, at.ring_bytes(num_slots, payload_bytes, num_readers))
    words = segment.buf.cast("Q")
    words[at.H_MAGIC] = at.MAGIC
    words[at.H_VERSION] = at.VERSION
    words[at.H_NUM_SLOTS] = num_slots
    words[at.H_SLOT_BYTES] = at.LINE + at.align(payload_bytes)
    words[at.H_NUM_READERS] = num_readers
    return segment
