"""`ObjectStore`: pages as objects of any S3-compatible service, through obstore.

    s3://BUCKET / PREFIX / <model and layout, 16 hex> / <key, hex>        header (`store.py`), then the page

Objects are written whole or not at all, which the service promises. The quota is for what lies under this model's
prefix and is kept by this process alone: it knows what was there at its start and what it wrote itself. Several
engines that write under one prefix should have the service's own limits; ours then holds for each of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import S3Store

from slipring.runtime.tiers.config import ObjectStoreConfig
from slipring.runtime.tiers.store import HEADER_BYTES, PageCorruptError, PageMissingError, count_while, seal, unseal
from slipring.scheduler.offload.key import OffloadKey

_TIMEOUT = timedelta(seconds=5)
"""Of one request; the tier's own deadline stands above it."""


class ObjectStore:
    name = "obj"
    read_only = False
    keys_per_lookup = 1

    def __init__(
        self,
        config: ObjectStoreConfig,
        identity: bytes,
        page_bytes: int,
        prefix: str = "slipring",
        quota_bytes: int | None = None,
    ) -> None:
        """`identity` as for `FileStore`. Asks the service what is there; raises OSError when it does not answer."""
        self._store = _connect(config)
        self._identity = identity
        self._page_bytes = page_bytes
        self._quota = quota_bytes
        self._home = f"{prefix.strip('/')}/{identity[:8].hex()}"
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Objects known to be there or under way, the one that was of use longest ago first."""
        self._under_way: set[str] = set()
        self._used = 0
        self._take_stock()

    @property
    def used_bytes(self) -> int:
        return self._used

    def count_prefix(self, keys: Sequence[OffloadKey]) -> int:
        return count_while(self.contains, keys)

    def contains(self, key: OffloadKey) -> bool:
        """Of what we know to be there the service is not asked; should it be gone after all, `read` will say so."""
        path = self._path(key)
        with self._lock:
            if path in self._under_way:
                return False
            if path in self._sizes:
                return True
        try:
            return obstore.head(self._store, path)["size"] == HEADER_BYTES + self._page_bytes
        except (FileNotFoundError, NotFoundError):
            return False

    def read(self, key: OffloadKey, into: memoryview) -> None:
        path = self._path(key)
        try:
            data = memoryview(obstore.get(self._store, path).bytes())
        except (FileNotFoundError, NotFoundError):
            self._forget(path)
            raise PageMissingError from None
        try:
            if data.nbytes != HEADER_BYTES + into.nbytes:
                raise PageCorruptError("an object of another size")
            unseal(bytes(data[:HEADER_BYTES]), key, self._identity, data[HEADER_BYTES:])
        except PageCorruptError:
            self._delete(path)
            raise
        into[:] = data[HEADER_BYTES:]
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)

    def write(self, key: OffloadKey, page: memoryview) -> bool:
        path, nbytes = self._path(key), HEADER_BYTES + page.nbytes
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
                return True
            victims = self._make_room(nbytes)
            if victims is None:
                return False
            self._sizes[path] = nbytes
            self._used += nbytes
            self._under_way.add(path)
        try:
            for victim in victims:
                obstore.delete(self._store, victim)
            obstore.put(self._store, path, seal(key, self._identity, page) + bytes(page))
        except BaseException:
            self._forget(path)
            raise
        finally:
            with self._lock:
                self._under_way.discard(path)
        return True

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, key: OffloadKey) -> str:
        return f"{self._home}/{key.hex()}"

    def _take_stock(self) -> None:
        try:
            found: list[Any] = [item for part in obstore.list(self._store, prefix=self._home) for item in part]
        except Exception as error:  # obstore's own classes; what matters is that it cannot be used
            raise OSError(f"the object store does not answer: {error}") from error
        for item in sorted(found, key=lambda item: item["last_modified"]):
            self._sizes[item["path"]] = item["size"]
        self._used = sum(self._sizes.values())

    def _make_room(self, nbytes: int) -> list[str] | None:
        """Objects that must go for `nbytes` more; they count as gone from now on. None: there is no room, and nothing
        has changed. What is on its way to the service stays: it could not be deleted yet."""
        if self._quota is None:
            return []
        victims, left = [], self._used
        for path, size in self._sizes.items():
            if left + nbytes <= self._quota:
                break
            if path not in self._under_way:
                victims.append(path)
                left -= size
        if left + nbytes > self._quota:
            return None
        for path in victims:
            self._used -= self._sizes.pop(path)
        return victims

    def _forget(self, path: str) -> None:
        with self._lock:
            self._used -= self._sizes.pop(path, 0)

    def _delete(self, path: str) -> None:
        obstore.delete(self._store, path)
        self._forget(path)


def _connect(config: ObjectStoreConfig) -> S3Store:
    endpoint = config.endpoint_override
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"{config.scheme}://{endpoint}"
    options: dict[str, Any] = {
        "endpoint": endpoint,
        "region": config.region,
        "access_key_id": config.access_key_id,
        "secret_access_key": config.secret_access_key,
        "session_token": config.session_token,
    }
    return S3Store(
        config.bucket,
        client_options={"timeout": _TIMEOUT, "connect_timeout": _TIMEOUT, "allow_http": True},
        retry_config={"max_retries": 1, "retry_timeout": _TIMEOUT},
        **{name: value for name, value in options.items() if value is not None},
    )
