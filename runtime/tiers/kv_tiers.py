"""`KvTiers`: the tiers of one engine. The CPU tier's memory, its index, and the stores behind it; all replicas share it.

A replica that computes a block makes it a hit for every other one. Everything in here runs on the loop's thread,
except for what the stores' own threads do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from hashlib import sha256

import msgspec
import numpy as np

from slipring.runtime.tiers.config import ExtraConfig, FileTier, KvTransferConfig, SecondaryTier
from slipring.runtime.tiers.file_store import FileStore
from slipring.runtime.tiers.jobs import StoreStats, StoreThreads
from slipring.runtime.tiers.store import PageStore
from slipring.scheduler.offload.policy import POLICIES
from slipring.scheduler.offload.slots import SlotIndex
from slipring.scheduler.offload.tiers import Tiers, TierStats
from slipring.shm.pages import PageShape, layout_digest
from slipring.shm.segment import Segment, memfd
from slipring.shm.spec import ModelSpec

_SAMPLE_BYTES = 4096


class TierSetupError(ValueError):
    """The tiers cannot be had as they were asked for; the message says why and what would do."""


class KvTiersStats(msgspec.Struct, frozen=True, kw_only=True):
    """A reading. Slots that are occupied and slots that are pinned are told apart: an idle full cache is full."""

    num_slots: int
    num_occupied: int
    num_pinned: int
    page_bytes: int
    tiers: TierStats
    stores: dict[str, StoreStats]
    """By the name of the store."""


class KvTiers:
    def __init__(self, config: KvTransferConfig, spec: ModelSpec, shape: PageShape, dtype: str) -> None:
        """Allocates the CPU tier and opens the stores. Raises TierSetupError."""
        extra = config.kv_connector_extra_config
        self.prompts_only = extra.offload_prompt_only
        self.page_bytes = shape.nbytes
        num_slots = extra.cpu_bytes_to_use // shape.nbytes
        if num_slots < 1:
            raise TierSetupError(
                f"cpu_bytes_to_use {extra.cpu_bytes_to_use} does not hold a single block of {shape.nbytes} bytes"
            )
        self.segment = _allocate(num_slots * shape.nbytes)
        slots = np.frombuffer(self.segment.buf, np.uint8).reshape(num_slots, shape.nbytes)
        self._stores: list[StoreThreads] = []
        try:
            self._open_stores(extra, spec, layout_digest(shape, dtype), slots)
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
            tiers=self.tiers.stats,
            stores={store.name: store.stats for store in self._stores},
        )

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self.segment.close()

    def _open_stores(self, extra: ExtraConfig, spec: ModelSpec, layout: bytes, slots: np.ndarray) -> None:
        if not extra.secondary_tiers:
            return
        identity = model_identity(spec, layout)
        for tier in extra.secondary_tiers:
            store = _open(tier, identity, self.page_bytes)
            self._stores.append(
                StoreThreads(
                    store,
                    slots,
                    asyncio.get_running_loop(),
                    num_readers=tier.n_read_threads if isinstance(tier, FileTier) else tier.io_threads,
                    num_writers=tier.n_write_threads if isinstance(tier, FileTier) else tier.io_threads,
                    load_timeout_s=tier.load_timeout_s,
                )
            )


def model_identity(spec: ModelSpec, layout: bytes) -> bytes:
    """32 bytes: these very weights in this layout. A sample of every tensor, so that hundreds of gigabytes need not
    be read; two models that differ in no tensor's first 4 KiB are one to us."""
    digest = sha256(layout)
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(path, "rb", buffering=0)) for path in spec.files]
        for tensor in spec.tensors:
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(os.pread(files[tensor.file].fileno(), min(_SAMPLE_BYTES, tensor.nbytes), tensor.offset))
    return digest.digest()


def _open(tier: SecondaryTier, identity: bytes, page_bytes: int) -> PageStore:
    try:
        if isinstance(tier, FileTier):
            return FileStore(tier.root_dir, identity, page_bytes, tier.quota_bytes)
        try:
            from slipring.runtime.tiers.object_store import ObjectStore
        except ImportError:
            raise TierSetupError("a tier of type 'obj' needs obstore: pip install 'slipring[s3]'") from None
        return ObjectStore(tier.store_config, identity, page_bytes, tier.prefix, tier.quota_bytes)
    except OSError as error:
        raise TierSetupError(f"the KV tier {tier.__struct_config__.tag!r} cannot be used: {error}") from error


def _allocate(nbytes: int) -> Segment:
    """A tier is too large for /dev/shm in most containers, so it is anonymous from the beginning."""
    try:
        return Segment(memfd("kv-tier", nbytes), nbytes)
    except OSError as error:
        raise TierSetupError(f"the CPU tier of {nbytes / 2**30:.2f} GiB cannot be allocated: {error}") from error
