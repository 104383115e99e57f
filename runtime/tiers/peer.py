"""The CPU tier of another instance, over TCP: `PeerServer` gives pages away, `PeerStore` asks for them.

One connection is one session; every number is little-endian:

    client  MAGIC, identity [32]                       who it is: model, weights and layout (`identity.py`)
    server  u32 0, or u32 n and n bytes: why not       then it closes
    client  u32 LOOKUP, u32 n, n keys                  server  u32: how many of the leading keys it has
    client  u32 FETCH, u32 1, key                      server  u32 1, header (`store.py`), page; or u32 0: no such page

An answer that is none of these ends the session: the client computes what it wanted, and the next question is asked
over a new connection, whatever else the peer had still to say.

Nothing is leased: a page is copied and sealed in a thread the moment it is asked for, so its slot is free again before
the client has read a byte. Whoever reads slowly is cut off (`_PATIENCE_S`), and a page that is not what was
stored does not pass the client's digest. The server trusts its network, as a cache does: bind it to a private one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from slipring.runtime.tiers.address import peer_name, plain_host
from slipring.runtime.tiers.store import HEADER_BYTES, PageMissingError, seal, unseal
from slipring.scheduler.offload.key import OffloadKey
from slipring.scheduler.offload.slots import Lookup, SlotIndex

logger = logging.getLogger(__name__)

_MAGIC = b"SLIPKV-PEER\x00\x00\x00\x00\x01"
_U32 = struct.Struct("<I")
_REQUEST = struct.Struct("<II")
_LOOKUP, _FETCH = 1, 2
_KEY_BYTES = 36
_MAX_KEYS = 65536
_MAX_REASON_BYTES = 1000
_PATIENCE_S = 10.0
"""For a client to take a page, or to finish a request that it has begun."""
_TIMEOUT_S = 2.0
"""Of the client, for each answer."""


class PeerServer:
    """Serves the pages of one instance's slots. On the loop's thread."""

    def __init__(self, index: SlotIndex, slots: NDArray[np.uint8], identity: bytes) -> None:
        self._index = index
        self._slots = slots
        self._identity = identity
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.served_bytes = 0

    async def start(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError when it cannot be had."""
        self._server = await asyncio.start_server(self._session, host, port)
        return self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.close()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if await self._greet(reader, writer):
                while True:
                    kind, count = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
                    await asyncio.wait_for(self._serve(kind, count, reader, writer), _PATIENCE_S)
        except (asyncio.IncompleteReadError, OSError, ValueError):
            pass  # gone, too slow, or no peer of ours: it has lost nothing that it could not compute
        finally:
            self._open.discard(writer)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        hello = await asyncio.wait_for(reader.readexactly(len(_MAGIC) + 32), _PATIENCE_S)
        if hello[: len(_MAGIC)] != _MAGIC:
            return False
        reason = b"" if hello[len(_MAGIC) :] == self._identity else b"another model, other weights or another layout"
        writer.write(_U32.pack(len(reason)) + reason)
        await writer.drain()
        return not reason

    async def _serve(self, kind: int, count: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not 0 < count <= _MAX_KEYS or kind not in (_LOOKUP, _FETCH) or (kind == _FETCH and count != 1):
            raise ValueError("no request of this protocol")
        data = await reader.readexactly(count * _KEY_BYTES)
        keys = [OffloadKey(data[at : at + _KEY_BYTES]) for at in range(0, len(data), _KEY_BYTES)]
        if kind == _LOOKUP:
            writer.write(_U32.pack(self._count_prefix(keys)))
        else:
            await self._give(keys[0], writer)
        await writer.drain()

    def _count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        for count, key in enumerate(keys):
            if self._index.lookup(key) is not Lookup.HIT:
                return count
        return len(keys)

    async def _give(self, key: OffloadKey, writer: asyncio.StreamWriter) -> None:
        if self._index.lookup(key) is not Lookup.HIT:
            writer.write(_U32.pack(0))
            return
        slots = self._index.prepare_load([key])
        try:
            header, page = await asyncio.to_thread(self._sealed, key, slots[0])
        finally:
            self._index.complete_load([key], slots)
        self._index.touch([key])
        self.served_bytes += len(page)
        writer.write(_U32.pack(1) + header)
        writer.write(page)

    def _sealed(self, key: OffloadKey, slot: int) -> tuple[bytes, bytes]:
        """A pinned slot's (header, page)."""
        page = bytes(self._slots[slot])
        return seal(key, self._identity, memoryview(page)), page


class PeerStore:
    """Pages of one other instance. Read only: what we compute it will ask us for."""

    read_only = True
    keys_per_lookup = _MAX_KEYS

    def __init__(self, host: str, port: int, identity: bytes) -> None:
        """Looks the host's name up, and connects when it is first asked; a peer may come later than we do."""
        self.name = peer_name(host, port)
        self._address = (plain_host(host), port)
        self._identity = identity
        self._aliases = {self.name}
        """By which others may call it. Names that clients send are not looked up, so addresses are kept here."""
        try:
            found = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("the peer %s:%d cannot be found yet: %s", host, port, error)
        else:
            self._aliases |= {peer_name(str(address[0]), port) for *_, address in found}
        self._local = threading.local()

    def goes_by(self, name: str) -> bool:
        return name in self._aliases

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        with self._session() as session:
            session.ask(_REQUEST.pack(_LOOKUP, len(keys)) + b"".join(keys))
            return session.receive_u32(len(keys))

    def read(self, key: OffloadKey, into: memoryview) -> None:
        with self._session() as session:
            session.ask(_REQUEST.pack(_FETCH, 1) + key)
            if not session.receive_u32(1):
                raise PageMissingError
            header = session.receive(HEADER_BYTES)
            session.receive_into(into)
            unseal(header, key, self._identity, into)

    def write(self, key: OffloadKey, page: memoryview) -> bool:
        return False

    def close(self) -> None:
        """Connections end with their threads."""

    @contextlib.contextmanager
    def _session(self) -> Iterator[_Session]:
        """This thread's connection, made anew if it has none; broken ones are not kept."""
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._connect()
        self._local.session = None
        try:
            yield session
        except PageMissingError:
            self._local.session = session
            raise
        except BaseException:
            session.close()
            raise
        self._local.session = session

    def _connect(self) -> _Session:
        session = _Session(self._address)
        self._aliases.add(peer_name(session.peer_host, self._address[1]))
        try:
            session.ask(_MAGIC + self._identity)
            if length := session.receive_u32(_MAX_REASON_BYTES):
                reason = session.receive(length).decode("utf-8", "replace")
                raise ConnectionError(f"the peer {self._address} refuses: {reason}")
        except BaseException:
            session.close()
            raise
        return session


class _Session:
    """A connection to a peer. An answer must be whole `_TIMEOUT_S` after its question, however busily it trickles."""

    def __init__(self, address: tuple[str, int]) -> None:
        """Raises OSError."""
        self._socket = socket.create_connection(address, _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = 0.0

    @property
    def peer_host(self) -> str:
        return self._socket.getpeername()[0]

    def ask(self, question: bytes) -> None:
        self._deadline = time.monotonic() + _TIMEOUT_S
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.sendall(question)

    def receive_into(self, into: memoryview) -> None:
        """Raises ConnectionError when the peer ends before `into` is full, TimeoutError when it is too slow."""
        while into.nbytes:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the peer is too slow")
            self._socket.settimeout(left_s)
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("the peer has gone")
            into = into[count:]

    def receive(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_u32(self, most: int) -> int:
        """Raises ConnectionError for a number above `most`: it is no peer of this protocol."""
        number = _U32.unpack(self.receive(_U32.size))[0]
        if number > most:
            raise ConnectionError(f"the peer answers {number} where {most} is the most there can be")
        return number

    def close(self) -> None:
        self._socket.close()
