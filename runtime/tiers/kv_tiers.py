"""`KvTiers`: the tiers of one engine. The CPU tier's memory, its index, and the stores behind it, for all replicas.

A replica that computes a block makes it a hit for every other one. Everything in here runs on the loop's thread,
except for what the stores' own threads do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from slipring.runtime.tiers.address import plain_host, split_peer
from slipring.runtime.tiers.config import FileTier, KvTransferConfig, ObjectTier, PeerTier, SecondaryTier
from slipring.runtime.tiers.file_store import FileStore
from slipring.runtime.tiers.identity import model_identity
from slipring.runtime.tiers.jobs import StoreStats, StoreThreads
from slipring.runtime.tiers.peer import PeerServer, PeerStore
from slipring.runtime.tiers.store import HEADER_BYTES, PageStore
from slipring.scheduler.offload.key import OffloadKey
from slipring.scheduler.offload.policy import POLICIES
from slipring.scheduler.offload.slots import Lookup, SlotIndex
from slipring.scheduler.offload.tiers import CPU as CPU
from slipring.scheduler.offload.tiers import Tiers, TierStats
from slipring.scheduler.offload.transfers import OffloadStats
from slipring.shm.memory import available_bytes
from slipring.shm.pages import PageShape
from slipring.shm.segment import Segment, memfd
from slipring.shm.spec import ModelSpec

logger = logging.getLogger(__name__)


class TierSetupError(ValueError):
    """The tiers cannot be had as they were asked for; the message says why and what would do."""


def _identity(spec: ModelSpec, shape: PageShape, dtype: str, max_model_len: int) -> bytes:
    try:
        return model_identity(spec, shape, dtype, max_model_len)
    except OSError as error:
        raise TierSetupError(f"the model's weights cannot be read: {error}") from error


class KvTiersStats(msgspec.Struct, frozen=True, kw_only=True):
    """A reading. Slots that are occupied and slots that are pinned are told apart: an idle full cache is full."""

    num_slots: int
    num_occupied: int
    num_pinned: int
    page_bytes: int
    block_size: int
    """Tokens of a page."""
    device: OffloadStats
    """Between the device and the slots."""
    tiers: TierStats
    stores: dict[str, StoreStats]
    """By the name of the store."""


class KvTiers:
    def __init__(
        self,
        config: KvTransferConfig,
        spec: ModelSpec,
        shape: PageShape,
        dtype: str,
        max_model_len: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Allocates the CPU tier and opens the stores, in any thread. Raises TierSetupError."""
        self._loop = loop
        self.device = OffloadStats()
        extra = config.kv_connector_extra_config
        self.prompts_only = extra.offload_prompt_only
        self.page_bytes = shape.nbytes
        self._block_size = shape.block_size
        num_slots = extra.cpu_bytes_to_use // shape.nbytes
        if num_slots < 1:
            raise TierSetupError(
                f"cpu_bytes_to_use {extra.cpu_bytes_to_use} does not hold a single block of {shape.nbytes} bytes"
            )
        self.segment = _allocate(num_slots * shape.nbytes)
        slots = np.frombuffer(self.segment.buf, np.uint8).reshape(num_slots, shape.nbytes)
        self._stores: list[StoreThreads] = []
        self._peers: list[PeerStore] = []
        self._slots = slots
        self._server: PeerServer | None = None
        self._listen: PeerTier | None = None
        self._identity = b""
        self.serves_at: tuple[str, int] | None = None
        """Where peers find our pages."""
        try:
            if extra.secondary_tiers:
                self._identity = _identity(spec, shape, dtype, max_model_len)
            for tier in extra.secondary_tiers:
                self._open(tier)
        except BaseException:
            self.close()
            raise
        policy = POLICIES[extra.eviction_policy](num_slots)
        self.tiers = Tiers(SlotIndex(num_slots, policy, extra.store_threshold), self._stores)

    def stats(self) -> KvTiersStats:
        index = self.tiers.slots
        return KvTiersStats(
            num_slots=index.num_slots,
            num_occupied=index.num_occupied,
            num_pinned=index.num_pinned,
            page_bytes=self.page_bytes,
            block_size=self._block_size,
            device=replace(self.device),
            tiers=replace(self.tiers.stats, reused_from=self.tiers.stats.reused_from.copy()),
            stores={store.name: replace(store.stats) for store in self._stores},
        )

    async def start(self) -> None:
        """Serve our pages to peers, if we shall. Raises TierSetupError."""
        if self._listen is None:
            return
        assert self._listen.port is not None
        self._server = PeerServer(self.tiers.slots, self._slots, self._identity)
        try:
            port = await self._server.start(plain_host(self._listen.listens_at), self._listen.port)
            self.serves_at = plain_host(self._listen.advertise_host or self._listen.listens_at), port
        except OSError as error:
            where = f"{self._listen.listens_at}:{self._listen.port}"
            raise TierSetupError(f"KV pages cannot be served at {where}: {error}") from None

    @property
    def peers(self) -> list[str]:
        """Names of the stores that are other instances."""
        return [peer.name for peer in self._peers]

    def peer(self, name: str) -> str | None:
        """The one of them that `p2p:HOST:PORT` means, in these words or by an address of its own."""
        return next((peer.name for peer in self._peers if peer.goes_by(name)), None)

    async def stored(self, keys: Sequence[OffloadKey], timeout_s: float) -> bool:
        """Wait until all of them lie in the CPU tier; False when they do not after so long."""
        slots = self.tiers.slots
        return await self._until(lambda: all(slots.lookup(key) is Lookup.HIT for key in keys), timeout_s)

    async def flush(self, timeout_s: float) -> None:
        """Wait, not longer than this, until the slower tiers have what they shall; the CPU tier dies with us."""
        if not await self._until(lambda: not self.tiers.num_handing_down, timeout_s):
            logger.warning("KV tiers: not every block was written within %.0f s; the rest is lost", timeout_s)

    async def _until(self, true: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something that stores bring about; False when they have not after so long."""
        arrived = asyncio.Event()
        self.tiers.on_stored.add(arrived.set)
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    arrived.clear()
                    await arrived.wait()
        except TimeoutError:
            return False
        finally:
            self.tiers.on_stored.discard(arrived.set)
        return True

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for store in self._stores:
            store.close()
        self.segment.close()

    def _open(self, tier: SecondaryTier) -> None:
        if not isinstance(tier, PeerTier):
            _check_quota(tier.quota_bytes, self.page_bytes + HEADER_BYTES)
        if isinstance(tier, PeerTier):
            if tier.port is not None:
                self._listen = tier
            for peer in tier.peers:
                self._peers.append(PeerStore(*split_peer(peer), self._identity))
                self._add(self._peers[-1], tier.num_threads, 0, tier.load_timeout_s)
        elif isinstance(tier, FileTier):
            store = _usable(tier, lambda: FileStore(tier.root_dir, self._identity, self.page_bytes, tier.quota_bytes))
            self._add(store, tier.n_read_threads, tier.n_write_threads, tier.load_timeout_s)
        else:
            store = _usable(tier, lambda: _object_store(tier, self._identity, self.page_bytes))
            self._add(store, tier.io_threads, tier.io_threads, tier.load_timeout_s)

    def _add(self, store: PageStore, num_readers: int, num_writers: int, load_timeout_s: float) -> None:
        threads = StoreThreads(
            store,
            self._slots,
            self._loop,
            num_readers=num_readers,
            num_writers=num_writers,
            load_timeout_s=load_timeout_s,
        )
        taken = [other.name for other in self._stores]
        for number in range(2, len(taken) + 2):  # of two directories the second is fs-2
            if threads.name not in taken:
                break
            threads.name = f"{store.name}-{number}"
        self._stores.append(threads)


def _check_quota(quota_bytes: int | None, page_bytes: int) -> None:
    if quota_bytes is not None and quota_bytes < page_bytes:
        raise TierSetupError(f"quota_bytes {quota_bytes} does not hold a single block of {page_bytes} bytes")


def _usable(tier: SecondaryTier, make: Callable[[], PageStore]) -> PageStore:
    try:
        return make()
    except OSError as error:
        kind = tier.__struct_config__.tag
        what = f"`root_dir` {tier.root_dir!r}: {error.strerror or error}" if isinstance(tier, FileTier) else str(error)
        raise TierSetupError(f"the KV tier of type {kind!r} cannot be used: {what}") from error


def _object_store(tier: ObjectTier, identity: bytes, page_bytes: int) -> PageStore:
    try:
        from slipring.runtime.tiers.object_store import ObjectStore
    except ImportError:
        raise TierSetupError("a KV tier of type 'obj' needs obstore: pip install 'slipring[s3]'") from None
    return ObjectStore(tier.store_config, identity, page_bytes, tier.prefix, tier.quota_bytes)


def _allocate(nbytes: int) -> Segment:
    """A tier is too large for /dev/shm in most containers, so it is anonymous from the beginning."""
    available = available_bytes()
    if nbytes > available:  # allocating it would not fail, but call the out-of-memory killer
        raise TierSetupError(
            f"the CPU tier of {nbytes / 2**30:.2f} GiB does not fit into the {available / 2**30:.2f} GiB of memory "
            "that are available: lower cpu_bytes_to_use (--kv-offloading-size)"
        )
    try:
        return Segment(memfd("kv-tier", nbytes), nbytes)
    except OSError as error:
        raise TierSetupError(f"the CPU tier of {nbytes / 2**30:.2f} GiB cannot be allocated: {error}") from error
