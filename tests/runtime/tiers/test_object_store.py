"""The object tier against a real S3-speaking server in another process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import boto3
import obstore
import pytest
from obstore.store import S3Store

from slipring.runtime.tiers.config import ObjectStoreConfig
from slipring.runtime.tiers.object_store import ObjectStore
from slipring.runtime.tiers.store import HEADER_BYTES, PageCorruptError, PageMissingError
from tests.runtime.tiers.test_file_store import LAYOUT, PAGE, key, page

FILE = PAGE + HEADER_BYTES
_SERVE = "from moto.server import main; import sys; main(['-p', sys.argv[1]])"


class S3Server:
    """A bucket named `pages`."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        client = boto3.client(
            "s3", "us-east-1", endpoint_url=self.url, aws_access_key_id="a", aws_secret_access_key="b"
        )
        client.create_bucket(Bucket="pages")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> ObjectStoreConfig:
        return ObjectStoreConfig(bucket="pages", endpoint_override=self.url, access_key_id="a", secret_access_key="b")

    def raw(self) -> S3Store:
        return S3Store(
            "pages",
            endpoint=self.url,
            access_key_id="a",
            secret_access_key="b",
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def store(s3: S3Server, prefix: str, quota: int | None = None) -> ObjectStore:
    return ObjectStore(s3.config, LAYOUT, PAGE, prefix, quota)


def read(tier: ObjectStore, number: int) -> bytes:
    into = bytearray(PAGE)
    tier.read(key(number), memoryview(into))
    return bytes(into)


def test_a_page_comes_back_also_after_a_restart(s3: S3Server) -> None:
    first = store(s3, "restart")
    assert not first.contains(key(1))
    with pytest.raises(PageMissingError):
        read(first, 1)
    assert first.write(key(1), page(1)) and first.contains(key(1))
    second = store(s3, "restart")
    assert read(second, 1) == page(1)
    assert second.used_bytes == FILE


def test_a_damaged_object_is_noticed_and_removed(s3: S3Server) -> None:
    tier = store(s3, "damage")
    tier.write(key(1), page(1))
    (path,) = [item["path"] for part in obstore.list(s3.raw(), prefix="damage") for item in part]
    data = bytearray(obstore.get(s3.raw(), path).bytes())
    data[-1] ^= 1
    obstore.put(s3.raw(), path, bytes(data))
    with pytest.raises(PageCorruptError):
        read(tier, 1)
    assert not tier.contains(key(1)) and tier.used_bytes == 0
    assert tier.write(key(1), page(1)) and read(tier, 1) == page(1)
    obstore.put(s3.raw(), path, b"short")
    with pytest.raises(PageCorruptError):
        read(tier, 1)


def test_the_service_is_asked_only_for_what_is_not_known(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, other = store(s3, "asked"), store(s3, "asked")
    tier.write(key(1), page(1))
    other.write(key(2), page(2))
    asked: list[str] = []
    head = obstore.head
    monkeypatch.setattr(obstore, "head", lambda service, path: asked.append(path) or head(service, path))
    assert tier.contains(key(1)) and not asked
    assert tier.contains(key(2)) and not tier.contains(key(3)) and len(asked) == 2
    obstore.delete(s3.raw(), asked[0].replace(key(2).hex(), key(1).hex()))
    with pytest.raises(PageMissingError):
        read(tier, 1)
    assert not tier.contains(key(1)) and tier.used_bytes == 0


def test_what_was_of_use_longest_ago_goes_first(s3: S3Server) -> None:
    tier = store(s3, "quota", 2 * FILE + 1)
    for number in (0, 1):
        tier.write(key(number), page(number))
    read(tier, 0)
    tier.write(key(2), page(2))
    assert [tier.contains(key(number)) for number in range(3)] == [True, False, True]
    listed = sum(item["size"] for part in obstore.list(s3.raw(), prefix="quota") for item in part)
    assert listed == tier.used_bytes == 2 * FILE
    tier._under_way.add(next(iter(tier._sizes)))
    assert tier.write(key(3), page(3)) and [tier.contains(key(number)) for number in (0, 2, 3)] == [False, False, True]
    assert tier.used_bytes == 2 * FILE, "what is under way is not deleted before it is there"
    assert not store(s3, "tiny", FILE - 1).write(key(1), page(1))


def test_a_service_that_is_not_there_is_told_at_the_start() -> None:
    gone = ObjectStoreConfig(bucket="pages", endpoint_override="127.0.0.1:9", access_key_id="a", secret_access_key="b")
    with pytest.raises(OSError, match="does not answer"):
        ObjectStore(gone, LAYOUT, PAGE)


def test_a_service_that_dies_is_an_error_for_the_caller_to_count(s3: S3Server) -> None:
    mortal = S3Server()
    tier = store(mortal, "mortal")
    tier.write(key(1), page(1))
    mortal.close()
    with pytest.raises(Exception, match=r"."):
        read(tier, 1)
    with pytest.raises(Exception, match=r"."):
        tier.write(key(2), page(2))
    assert tier.used_bytes == FILE
