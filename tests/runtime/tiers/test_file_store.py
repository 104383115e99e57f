"""The file tier: what is stored is found again by anybody, and what is damaged is never given out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from slipring.runtime.tiers.file_store import FileStore
from slipring.runtime.tiers.store import HEADER_BYTES, PageCorruptError, PageMissingError
from slipring.scheduler.offload.key import OffloadKey, offload_key

PAGE = 5000
FILE = PAGE + HEADER_BYTES
LAYOUT = b"L" * 32


def key(number: int, group: int = 0) -> OffloadKey:
    return offload_key(number.to_bytes(32, "big"), group)


def page(number: int) -> memoryview:
    return memoryview(np.random.default_rng(number).integers(0, 256, PAGE, np.uint8).tobytes())


def store(root: Path, quota: int | None = None, layout: bytes = LAYOUT) -> FileStore:
    return FileStore(root, layout, PAGE, quota)


def read(tier: FileStore, number: int) -> bytes:
    into = bytearray(PAGE)
    tier.read(key(number), memoryview(into))
    return bytes(into)


def sizes(root: Path) -> int:
    """Bytes of all pages, finished or not."""
    total = 0
    for path in root.rglob("*"):
        if path.suffix in (".kv", ".tmp"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def file_of(root: Path, number: int) -> Path:
    (found,) = root.rglob(f"{key(number).hex()}.kv")
    return found


def is_cached(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(FILE)], 0, os.RWF_NOWAIT) == FILE
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def test_a_lookup_has_read_ahead_what_it_finds(tmp_path: Path) -> None:
    tier = store(tmp_path)
    tier.write(key(1), page(1))
    path = file_of(tmp_path, 1)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if is_cached(path):
        pytest.skip("this file system lives in memory")
    assert tier.count_prefix([key(1), key(2)]) == 1
    deadline = time.monotonic() + 10
    while not is_cached(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_page_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    first = store(tmp_path)
    assert not first.contains(key(1))
    with pytest.raises(PageMissingError):
        read(first, 1)
    assert first.write(key(1), page(1))
    first.close()
    second = store(tmp_path)
    assert second.contains(key(1)) and not second.contains(key(1, group=1))
    assert read(second, 1) == page(1)
    assert second.used_bytes == FILE == sizes(tmp_path)


def test_other_layouts_do_not_see_each_other(tmp_path: Path) -> None:
    one, two = store(tmp_path), store(tmp_path, layout=b"M" * 32)
    one.write(key(1), page(1))
    assert not two.contains(key(1))
    assert two.used_bytes == FILE  # the quota is the directory's


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 9, 20, 60, 100, HEADER_BYTES, FILE - 1])
def test_a_flipped_bit_anywhere_is_noticed_and_the_page_removed(tmp_path: Path, at: int) -> None:
    tier = store(tmp_path)
    tier.write(key(1), page(1))
    flip(file_of(tmp_path, 1), at)
    with pytest.raises(PageCorruptError):
        read(tier, 1)
    assert not tier.contains(key(1)) and tier.used_bytes == 0 == sizes(tmp_path)
    assert tier.write(key(1), page(1)) and read(tier, 1) == page(1)


def test_a_page_under_another_name_is_not_trusted(tmp_path: Path) -> None:
    tier = store(tmp_path)
    tier.write(key(1), page(1))
    tier.write(key(2), page(2))
    file_of(tmp_path, 2).write_bytes(file_of(tmp_path, 1).read_bytes())
    with pytest.raises(PageCorruptError):
        read(tier, 2)


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, FILE - 1, FILE + 1])
def test_a_file_of_another_length_is_a_miss_and_is_replaced(tmp_path: Path, length: int) -> None:
    tier = store(tmp_path)
    tier.write(key(1), page(1))
    os.truncate(file_of(tmp_path, 1), length)
    assert not tier.contains(key(1))
    assert tier.write(key(1), page(1))
    assert read(tier, 1) == page(1)


def test_what_was_of_use_longest_ago_goes_first(tmp_path: Path) -> None:
    tier = store(tmp_path, quota=3 * FILE + FILE // 2)
    for number in range(3):
        tier.write(key(number), page(number))
    read(tier, 0)
    tier.write(key(3), page(3))
    assert [tier.contains(key(number)) for number in range(4)] == [True, False, True, True]
    assert tier.used_bytes == 3 * FILE == sizes(tmp_path)


def test_no_room_at_all_is_no_error(tmp_path: Path) -> None:
    tier = store(tmp_path, quota=FILE - 1)
    assert not tier.write(key(1), page(1))
    assert sizes(tmp_path) == 0 == tier.used_bytes


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = store(tmp_path)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space"):
        tier.write(key(1), page(1))
    monkeypatch.undo()
    assert sizes(tmp_path) == 0 == tier.used_bytes
    assert tier.write(key(1), page(1))


def test_a_directory_that_has_gone_is_a_miss_and_then_an_error(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    tier = store(root)
    tier.write(key(1), page(1))
    root.rename(tmp_path / "elsewhere")
    root.write_text("not a directory")
    assert not tier.contains(key(1))
    with pytest.raises(PageMissingError):
        read(tier, 1)
    with pytest.raises(OSError, match=r"[Nn]ot a directory|File exists"):
        tier.write(key(2), page(2))


_WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.runtime.tiers.test_file_store import key, page, store
    root, quota, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    tier = store(root, quota)
    print("ready", flush=True)
    for number in range(first, first + count):
        tier.write(key(number), page(number))
    """
)


def writer(root: Path, quota: int, first: int, count: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", _WRITER, str(root), str(quota), str(first), str(count)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_quotas_hold_to_the_byte_under_concurrent_writers(tmp_path: Path) -> None:
    quota = 10 * FILE + 17
    writers = [writer(tmp_path, quota, first, 150) for first in (0, 100, 10_000)]
    most = 0
    while any(process.poll() is None for process in writers):
        most = max(most, sizes(tmp_path))
    assert [process.returncode for process in writers] == [0, 0, 0]
    assert 0 < most <= quota
    tier = store(tmp_path, quota)
    assert tier.used_bytes == sizes(tmp_path) == 10 * FILE
    found = [number for number in (*range(250), *range(10_000, 10_150)) if tier.contains(key(number))]
    assert len(found) == 10 and all(read(tier, number) == page(number) for number in found)


def test_killed_writers_leave_a_readable_store_and_no_lost_bytes(tmp_path: Path) -> None:
    quota = 10 * FILE
    for round_ in range(4):
        process = writer(tmp_path, quota, 1000 * round_, 100_000)
        while sizes(tmp_path) < (3 + round_) * FILE:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        tier = store(tmp_path, quota)
        assert tier.used_bytes == sizes(tmp_path) <= quota
        assert not list(tmp_path.rglob("*.tmp")), "what a dead writer began is cleared away"
        for path in tmp_path.rglob("*.kv"):
            number = int(path.stem[:64], 16)
            assert read(tier, number) == page(number)
        tier.close()
