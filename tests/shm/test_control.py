"""Messages of any length arrive whole and in order, however slowly they are read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.shm.control import BuildGrammar, ControlEnd, GrammarBuilt, LoadTokenizer, Message
from slipring.shm.doorbell import Doorbell
from slipring.shm.grammar import Grammar
from slipring.shm.ring import RingReader, RingWriter, create_ring

SLOT_BYTES = 256


class Pair:
    def __init__(self) -> None:
        there, back = (create_ring(name, 3, SLOT_BYTES, 1) for name in ("there", "back"))
        self.engine_bell, self.worker_bell = Doorbell(), Doorbell()
        self.engine = ControlEnd(RingWriter(there), RingReader(back), self.worker_bell)
        self.worker = ControlEnd(RingWriter(back), RingReader(there), self.engine_bell)

    def close(self) -> None:
        self.engine_bell.close()
        self.worker_bell.close()


def message(number: int, size: int) -> Message:
    text = "x" * size
    kinds = (LoadTokenizer(text.encode()), BuildGrammar(number, Grammar(text, "regex")), GrammarBuilt(number, text))
    return kinds[number % 3]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5 * SLOT_BYTES), max_size=12), st.data())
def test_both_ways_at_any_pace(sizes: list[int], data: st.DataObject) -> None:
    pair = Pair()
    sent = [message(i, size) for i, size in enumerate(sizes)]
    got: dict[str, list[Message]] = {"engine": [], "worker": []}
    ends = {"engine": pair.engine, "worker": pair.worker}
    for item in sent:
        for end in ends.values():
            end.send(item)
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(["engine", "worker"]))
            got[name] += ends[name].receive()
    for _ in range(200):
        if not any(end.has_come() for end in ends.values()):
            break
        for name, end in ends.items():
            got[name] += end.receive()
    assert got == {"engine": sent, "worker": sent}
    pair.close()


def test_a_reader_that_makes_room_wakes_the_sender() -> None:
    pair = Pair()
    pair.engine.send(LoadTokenizer(bytes(5 * SLOT_BYTES)))
    pair.engine_bell.clear()
    assert pair.worker.receive() == []  # the last parts still wait with the sender
    assert pair.engine.has_come()
    assert pair.engine.receive() == []
    assert pair.worker.receive() == [LoadTokenizer(bytes(5 * SLOT_BYTES))]
    assert not pair.worker.has_come()
    pair.close()
