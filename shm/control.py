"""The control channel: rare messages between engine and worker that belong to no step, on rings of their own.

    engine ──control ring──▶ worker        LoadTokenizer, BuildGrammar, DropGrammar, MoveBlocks
    engine ◀──reply ring──── worker        GrammarBuilt, BlocksMoved

A worker reads it on a side thread, so a message never waits for a step, and a step never for a message. Messages are
msgspec msgpack. One that is longer than a slot goes in parts, in order; the last part has kind LAST. What finds no
room waits in its sender, who is rung when the receiver has made some.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Final

import msgspec

from slipring.shm.doorbell import Doorbell
from slipring.shm.grammar import Grammar
from slipring.shm.layout import LINE
from slipring.shm.ring import RingReader, RingWriter

NUM_SLOTS: Final = 4
SLOT_BYTES: Final = 65536


class LoadTokenizer(msgspec.Struct, frozen=True, tag=True):
    """What grammars need to know of the tokenizer; comes once, before the first of them."""

    document: bytes
    """A Hugging Face tokenizer.json."""


class BuildGrammar(msgspec.Struct, frozen=True, tag=True):
    """Answered by `GrammarBuilt`. Rows of the batch table name the grammar by its id from then on."""

    grammar_id: int
    grammar: Grammar


class DropGrammar(msgspec.Struct, frozen=True, tag=True):
    """No row will name it any more."""

    grammar_id: int


class GrammarBuilt(msgspec.Struct, frozen=True, tag=True):
    grammar_id: int
    error: str | None = None
    """Why it could not be built."""


class MoveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks[i] of the pool into slots[i] of the CPU tier or, for a load, the other way. Answered by
    `BlocksMoved`."""

    transfer_id: int
    is_load: bool
    blocks: list[int]
    slots: list[int]


class BlocksMoved(msgspec.Struct, frozen=True, tag=True):
    transfer_id: int
    seconds: float
    """What the copies took."""
    error: str | None = None
    """Why some of them, perhaps all, were not made."""


Message = LoadTokenizer | BuildGrammar | DropGrammar | GrammarBuilt | MoveBlocks | BlocksMoved
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


class _PartKind(IntEnum):
    MORE = 1
    LAST = 2


class ControlEnd:
    """One party's end of the channel. `send` and `receive` are one thread's business."""

    def __init__(self, outgoing: RingWriter, incoming: RingReader, peer: Doorbell) -> None:
        """`peer` wakes the other party."""
        self._outgoing, self._incoming, self._peer = outgoing, incoming, peer
        self._waiting: deque[tuple[_PartKind, bytes]] = deque()
        """Parts that found no room yet."""
        self._parts: list[bytes] = []
        """Of the message that is coming in."""

    def send(self, message: Message) -> None:
        data = _encoder.encode(message)
        size = self._outgoing.slot_bytes - LINE
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        self._waiting += [(_PartKind.MORE, part) for part in parts[:-1]]
        self._waiting.append((_PartKind.LAST, parts[-1]))
        if self._publish():
            self._peer.ring()

    def receive(self) -> list[Message]:
        """Every message that has come; call it whenever this party's doorbell rang.

        Raises msgspec.DecodeError on a protocol fault.
        """
        messages: list[Message] = []
        num_read = 0
        while (slot := self._incoming.try_read()) is not None:
            kind, length, _, _ = self._incoming.header(slot)
            self._parts.append(bytes(self._incoming.payload(slot)[:length]))
            self._incoming.advance()
            num_read += 1
            if kind == _PartKind.LAST:
                messages.append(_decoder.decode(b"".join(self._parts)))
                self._parts.clear()
        if self._publish() or num_read:
            self._peer.ring()
        return messages

    def has_come(self) -> bool:
        """Whether there is something for `receive` to do."""
        room = bool(self._waiting) and self._outgoing.try_claim() is not None
        return room or self._incoming.try_read() is not None

    def _publish(self) -> bool:
        """Put waiting parts into the ring, as many as it takes; whether there were any."""
        published = False
        while self._waiting and (slot := self._outgoing.try_claim()) is not None:
            kind, part = self._waiting.popleft()
            self._outgoing.payload(slot)[: len(part)] = part
            self._outgoing.publish(kind, len(part), 0)
            published = True
        return published
