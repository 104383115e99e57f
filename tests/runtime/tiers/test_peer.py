"""Pages from another instance: two real processes, and one that is killed in the middle."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipring.runtime.tiers.address import peer_name
from slipring.runtime.tiers.peer import PeerStore
from slipring.runtime.tiers.store import PageCorruptError, PageMissingError, seal
from tests.runtime.tiers.test_file_store import LAYOUT, PAGE, key, page

_INSTANCE = textwrap.dedent(
    """
    import asyncio, sys
    import numpy as np
    from slipring.runtime.tiers.peer import PeerServer
    from slipring.scheduler.offload.policy import Lru
    from slipring.scheduler.offload.slots import SlotIndex
    from tests.runtime.tiers.test_file_store import LAYOUT, PAGE, key, page

    async def main():
        index, slots = SlotIndex(8, Lru(8)), np.zeros((8, PAGE), np.uint8)
        plan = index.prepare_store([key(number) for number in range(4)])
        for number, slot in enumerate(plan.slots):
            slots[slot] = np.frombuffer(page(number), np.uint8)
        index.complete_store(plan.keys, plan.slots, True)
        print(await PeerServer(index, slots, LAYOUT).start("127.0.0.1", 0), flush=True)
        await asyncio.sleep(1000)

    asyncio.run(main())
    """
)


class Instance:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _INSTANCE], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    running = Instance()
    yield running
    running.kill()


def read(store: PeerStore, number: int) -> bytes:
    into = bytearray(PAGE)
    store.read(key(number), memoryview(into))
    return bytes(into)


def test_what_a_peer_has_is_found_and_fetched(instance: Instance) -> None:
    store = PeerStore("127.0.0.1", instance.port, LAYOUT)
    assert store.count_prefix([key(0), key(1), key(9), key(2)]) == 2
    assert [read(store, number) for number in range(4)] == [page(number) for number in range(4)]
    with pytest.raises(PageMissingError):
        read(store, 9)
    assert read(store, 0) == page(0), "the session goes on"
    assert not store.write(key(5), page(5))


def test_a_peer_goes_by_its_name_and_by_its_address(instance: Instance) -> None:
    by_name = PeerStore("localhost", instance.port, LAYOUT)
    assert by_name.count_prefix([key(0)]) == 1
    assert by_name.goes_by(f"p2p:localhost:{instance.port}") and by_name.goes_by(f"p2p:127.0.0.1:{instance.port}")
    assert not by_name.goes_by(f"p2p:127.0.0.1:{instance.port + 1}") and not by_name.goes_by("p2p:10.1.1.1:1")
    assert PeerStore("[::1]", 1, LAYOUT).goes_by(peer_name("0:0::1", 1))


def test_a_peer_whose_name_is_not_known_yet_is_no_error() -> None:
    store = PeerStore("no-such-host.invalid", 1, LAYOUT)
    with pytest.raises(OSError, match=r"."):
        store.count_prefix([key(0)])


def test_another_model_is_refused(instance: Instance) -> None:
    store = PeerStore("127.0.0.1", instance.port, b"M" * 32)
    with pytest.raises(ConnectionError, match="another model"):
        store.count_prefix([key(0)])


_HELLO = b"SLIPKV-PEER\x00\x00\x00\x00\x01" + LAYOUT


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 60, _HELLO + b"\xff" * 8])
def test_junk_ends_its_own_session_only(instance: Instance, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", instance.port), 5) as connection:
        connection.sendall(junk)
        connection.settimeout(5)
        while connection.recv(1000):
            pass
    assert read(PeerStore("127.0.0.1", instance.port, LAYOUT), 1) == page(1)


def test_a_peer_that_is_killed_is_an_error_and_quickly() -> None:
    first = Instance()
    store = PeerStore("127.0.0.1", first.port, LAYOUT)
    assert read(store, 0) == page(0)
    first.kill()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(OSError, match=r"."):
            read(store, 1)
    assert time.monotonic() - began < 2


WELCOME, FOUND, NOT_FOUND = b"\0\0\0\0", b"\1\0\0\0", b"\0\0\0\0"
TOO_MANY = b"\xff\xff\xff\xff"


def sealed(number: int, content: memoryview) -> bytes:
    return seal(key(number), LAYOUT, content) + content


@contextlib.contextmanager
def odd_peer(*answers: bytes, pause_s: float = 0.0) -> Iterator[PeerStore]:
    """One whose first session gives these answers, the greeting first, `pause_s` between their bytes, and then waits.
    In later ones it has one key and no page."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as sessions:
        listener.settimeout(5)

        def serve() -> None:
            for said in (answers, (WELCOME, FOUND)):
                session = sessions.enter_context(listener.accept()[0])
                for answer in said:
                    session.recv(1000)
                    with contextlib.suppress(ConnectionError):
                        for piece in [answer] if not pause_s else [answer[at : at + 1] for at in range(len(answer))]:
                            session.sendall(piece)
                            time.sleep(pause_s)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield PeerStore("127.0.0.1", listener.getsockname()[1], LAYOUT)
        thread.join(5)
        assert not thread.is_alive(), "a second session was begun"


@pytest.mark.parametrize("answer", [b"\3\0\0\0", TOO_MANY, FOUND[:2]])
def test_a_peer_that_counts_more_than_it_was_asked_for_is_none(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipring.runtime.tiers.peer._TIMEOUT_S", 0.3)
    with odd_peer(WELCOME, answer) as store:
        with pytest.raises(OSError, match=r"most there can be|timed out"):
            store.count_prefix([key(0), key(1)])
        assert store.count_prefix([key(0), key(1)]) == 1, "over a new connection"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\2\0\0\0" + sealed(0, page(0)), ConnectionError),
        (FOUND + sealed(1, page(1)), PageCorruptError),
        (FOUND + sealed(0, page(0))[:-1] + b"?", PageCorruptError),
        (FOUND + sealed(0, memoryview(bytes(page(0)) * 2)), PageCorruptError),
        (FOUND + sealed(0, page(0)[:-1]), TimeoutError),
        (FOUND + b"x" * 1000, TimeoutError),
    ],
    ids=["two pages", "another page", "a damaged one", "a longer one", "a shorter one", "a piece"],
)
def test_what_is_not_the_page_that_was_asked_for_is_not_taken(
    answer: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipring.runtime.tiers.peer._TIMEOUT_S", 0.3)
    with odd_peer(WELCOME, answer) as store:
        with pytest.raises(error):
            read(store, 0)
        assert store.count_prefix([key(0)]) == 1, "nothing of the first answer is read as the next one"


def test_a_refusal_without_end_is_not_waited_for() -> None:
    with odd_peer(TOO_MANY + b"no") as store:
        with pytest.raises(ConnectionError, match="most there can be"):
            store.count_prefix([key(0)])
        assert store.count_prefix([key(0)]) == 1


def test_a_peer_that_trickles_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipring.runtime.tiers.peer._TIMEOUT_S", 0.3)
    with odd_peer(WELCOME, FOUND + sealed(0, page(0))[:100], pause_s=0.02) as store:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            read(store, 0)
        assert time.monotonic() - began < 1.5
        assert store.count_prefix([key(0)]) == 1
