"""The ring's layout: every offset, and who writes and who reads each word. `ring.py` contains no numbers.

    0          ┌──────────────────────────────────────────────────────────────┐
               │ magic u64 │ version u64 │ num_slots u64 │ slot_bytes u64     │  header: written once by the
               │ num_readers u64 │ 0 │ 0 │ 0                                  │  creator, read by everybody
    64         ├──────────────────────────────────────────────────────────────┤
               │ pid u64 │ published u64 │ 0 ...                              │  the writer's line
    128        ├──────────────────────────────────────────────────────────────┤
               │ pid u64 │ read u64 │ heartbeat u64 │ phase u64 │ 0 ...       │  reader 0's line
    192        ├──────────────────────────────────────────────────────────────┤
               │ ... one 64-byte line per reader ...                          │
               ├──────────────────────────────────────────────────────────────┤
    slots_at   │ sequence u64 │ kind u64 │ length u64 │ step_id u64 │ ns u64  │  slot header, 64 bytes
               │ payload, slot_bytes - 64 bytes, 64-byte aligned              │
               ├──────────────────────────────────────────────────────────────┤
               │ ... num_slots slots; slot of sequence s is s mod num_slots   │
               └──────────────────────────────────────────────────────────────┘

| word            | writer      | readers       | meaning                                                       |
|-----------------|-------------|---------------|---------------------------------------------------------------|
| header          | creator     | all           | fixed at creation; a mismatch refuses to attach               |
| writer.pid      | the writer  | diagnostics   | who publishes                                                 |
| writer.published| the writer  | every reader  | slots with sequence < published are complete                  |
| reader.pid      | that reader | the writer    | who reads                                                     |
| reader.read     | that reader | the writer    | slots with sequence < read may be overwritten                 |
| reader.heartbeat| that reader | the writer    | CLOCK_MONOTONIC, nanoseconds, of its last sign of life        |
| reader.phase    | that reader | the writer    | a `Phase`                                                     |
| slot header     | the writer  | every reader  | stable between publication and the slowest reader's advance   |
| payload         | the writer  | every reader  | likewise                                                      |

Cursors only grow. All words are aligned 64-bit integers, so on the machines we run on a load or store of one is
indivisible; each party's line is a cache line of its own.
"""

from __future__ import annotations

from enum import IntEnum

MAGIC = 0x534C4950_52494E47  # "SLIPRING"
VERSION = 3
LINE = 64
"""Bytes of a cache line; every party's words and every slot start on one."""
WORD = 8

# Word indices (in 64-bit words) inside the header line.
H_MAGIC, H_VERSION, H_NUM_SLOTS, H_SLOT_BYTES, H_NUM_READERS = range(5)
# Word indices inside the writer's line and inside a reader's line.
W_PID, W_PUBLISHED = range(2)
R_PID, R_READ, R_HEARTBEAT, R_PHASE = range(4)
# Word indices inside a slot's header.
S_SEQUENCE, S_KIND, S_LENGTH, S_STEP_ID, S_PUBLISH_NS = range(5)

WORDS_PER_LINE = LINE // WORD
WRITER_AT = WORDS_PER_LINE
READERS_AT = 2 * WORDS_PER_LINE

assert LINE % WORD == 0, "a word must never straddle a cache line"


class Phase(IntEnum):
    """What a reader is doing; the supervisor's deadlines depend on it."""

    STARTING = 0
    LOADING = 1
    COMPILING = 2
    CAPTURING = 3
    WAITING = 4
    RUNNING = 5
    DRAINING = 6


def align(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def slots_at(num_readers: int) -> int:
    """Byte offset of the first slot."""
    return LINE * (2 + num_readers)


def ring_bytes(num_slots: int, payload_bytes: int, num_readers: int) -> int:
    """Size of the whole segment."""
    return slots_at(num_readers) + num_slots * (LINE + align(payload_bytes))
