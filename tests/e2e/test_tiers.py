"""KV tiers through the engine: whatever is loaded, lost or broken, the tokens are those of an engine without tiers, and
no client sees an error.

On a tiny model, and where a worker dies on the real one in float32."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from slipring.runtime.engine import Engine, StartupError
from slipring.runtime.request import GenerationRequest
from slipring.shm.params import SamplingParams
from tests.e2e.tier_rig import (
    BLOCK_BYTES,
    POOL,
    TINY_BLOCK_BYTES,
    TINY_TOKENS,
    Answer,
    ask,
    finished,
    running,
    save_tiny_model,
    started,
    tiers,
)
from tests.runtime.tiers.test_object_store import S3Server
from tests.waits import settled

PROMPT = [TINY_TOKENS[7 * number % 200] for number in range(61)]
CROWD = [[TINY_TOKENS[200 + 12 * other + number % 12] for number in range(60)] for other in range(4)]


async def crowd_out(engine: Engine, round_: int) -> None:
    """Other prompts, until the pool has lost ours."""
    for number, other in enumerate(CROWD):
        await finished(ask(engine, f"crowd-{round_}-{number}", other, 1))


@dataclass(frozen=True)
class Target:
    model: str
    block_bytes: int
    expected: list[int]
    """What it says to `PROMPT` without tiers."""

    def tiers(self, num_slots: int, *slow: dict[str, Any], **extra: Any) -> dict[str, Any]:
        """Settings."""
        return POOL | {"model": self.model} | tiers(num_slots, *slow, block_bytes=self.block_bytes, **extra)


def target(model: str, block_bytes: int) -> Target:
    async def main() -> list[int]:
        async with running(POOL | {"model": model}) as (engine,):
            return await finished(ask(engine, "alone", PROMPT, 8))

    return Target(model, block_bytes, uvloop.run(main()))


@pytest.fixture(scope="module")
def real() -> Target:
    return target("smollm2", BLOCK_BYTES)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target(save_tiny_model(tmp_path_factory.mktemp("tiny")), TINY_BLOCK_BYTES)


def run_twice(target: Target, settings: dict[str, Any], between: Callable[[], object]) -> tuple[int, Any]:
    """Ask, lose it, let `between` happen, ask again. Returns (tokens hit the second time, stats)."""

    async def main() -> tuple[int, Any]:
        engine = await started(**settings)
        try:
            assert await finished(ask(engine, "first", PROMPT, 8)) == target.expected
            await crowd_out(engine, 0)
            await settled(engine)
            await arrived(engine)
            between()
            again = ask(engine, "again", PROMPT, 8)
            assert await finished(again) == target.expected
            await settled(engine)
            return again.num_cached, engine.stats().tiers
        finally:
            await engine.stop()

    return uvloop.run(main())


async def arrived(engine: Engine) -> None:
    """Wait until no store has taken a page for a while: what is handed down is there, then."""
    before = None
    while (taken := _stored_bytes(engine)) != before:
        before = taken
        await asyncio.sleep(0.3)


def _stored_bytes(engine: Engine) -> int:
    tiers = engine.stats().tiers
    return sum(store.stored_bytes for store in tiers.stores.values()) if tiers is not None else 0


def nothing() -> None:
    pass


def test_the_cpu_tier_brings_a_prefix_back(small: Target) -> None:
    num_cached, stats = run_twice(small, small.tiers(200), nothing)
    assert num_cached == 60 and stats.device.loaded_blocks > 0


def pages(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def damage_all(root: Path) -> None:
    for path in pages(root):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x40
        path.write_bytes(data)


def cut_all(root: Path) -> None:
    for path in pages(root):
        os.truncate(path, path.stat().st_size // 2)


def replace_by_a_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("no directory any more")


FAULTS = {
    "corrupt": damage_all,
    "truncated": cut_all,
    "deleted": lambda root: [path.unlink() for path in pages(root)],
    "unreadable": replace_by_a_file,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_tier_that_is_damaged_costs_time_and_nothing_else(tmp_path: Path, small: Target, fault: str) -> None:
    root = tmp_path / "kv"
    settings = small.tiers(16, {"type": "fs", "root_dir": str(root)})
    num_cached, stats = run_twice(small, settings, lambda: FAULTS[fault](root))
    assert num_cached < 60, "nothing damaged was taken for good"
    if fault == "corrupt":
        assert stats.stores["fs"].corrupt > 0


def test_a_restart_finds_its_files(tmp_path: Path, small: Target) -> None:
    settings = small.tiers(200, {"type": "fs", "root_dir": str(tmp_path)})

    async def launch(number: int) -> int:
        engine = await started(**settings)
        try:
            answer = ask(engine, f"launch-{number}", PROMPT, 8)
            assert await finished(answer) == small.expected
            return answer.num_cached
        finally:
            await engine.stop()

    assert uvloop.run(launch(0)) == 0
    assert uvloop.run(launch(1)) == 60


def test_a_slow_disk_is_not_waited_for(tmp_path: Path, small: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from slipring.runtime.tiers.file_store import FileStore

    read = FileStore.read

    def crawl(self: FileStore, *arguments: Any) -> None:
        time.sleep(3)
        read(self, *arguments)

    settings = small.tiers(16, {"type": "fs", "root_dir": str(tmp_path), "load_timeout_s": 0.2})
    num_cached, stats = run_twice(small, settings, lambda: monkeypatch.setattr(FileStore, "read", crawl))
    assert num_cached < 60 and stats.stores["fs"].late > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB: four pages of memory."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_keeps_what_fits_and_serves(small_disk: Path, small: Target) -> None:
    settings = small.tiers(16, {"type": "fs", "root_dir": str(small_disk)})
    _, stats = run_twice(small, settings, nothing)
    assert stats.stores["fs"].failed > 0
    assert 0 < len(pages(small_disk)) < 6 and not list(small_disk.rglob("*.tmp"))


def test_an_object_store_that_dies_in_mid_service(real: Target) -> None:
    """On the real model, whose prompts take longer to compute than to fetch from there."""
    s3 = S3Server()
    try:
        tier = {
            "type": "obj",
            "store_config": {
                "bucket": "pages",
                "endpoint_override": s3.url,
                "access_key_id": "a",
                "secret_access_key": "b",
            },
        }
        num_cached, stats = run_twice(real, real.tiers(16, tier), nothing)
        assert num_cached == 60, f"while it lives, it serves: {stats.stores}"
        num_cached, stats = run_twice(real, real.tiers(16, tier), s3.close)
        assert num_cached < 60 and stats.stores["obj"].failed > 0
    finally:
        s3.close()


def test_a_killed_workers_blocks_come_back_from_the_tier(real: Target) -> None:
    async def main() -> None:
        engine = await started(**real.tiers(200))
        try:
            assert await finished(ask(engine, "first", PROMPT, 8)) == real.expected
            await settled(engine)
            os.kill(engine.worker_pids[0], 9)
            await asyncio.sleep(0.1)
            again = ask(engine, "again", PROMPT, 8)
            assert await finished(again) == real.expected
            stats = engine.stats().tiers
            assert again.num_cached == 60 and stats is not None and stats.device.loaded_blocks >= 15
            await settled(engine)
        finally:
            await engine.stop()

    uvloop.run(main())


def test_two_replicas_share_the_tier(small: Target) -> None:
    async def main() -> None:
        engine = await started(**small.tiers(200), data_parallel_size=2)
        try:
            for number, rank in enumerate((0, 1, 1)):
                if number == 2:
                    engine.reset_prefix_cache(external=True)
                answer = Answer()
                params = SamplingParams(max_tokens=8, temperature=0.0)
                request = GenerationRequest(
                    request_id=f"number-{number}", prompt_token_ids=PROMPT, params=params, data_parallel_rank=rank
                )
                engine.submit(request, answer.sink)
                assert await finished(answer) == small.expected
                assert answer.num_cached == (60 if number == 1 else 0)
                await settled(engine)
        finally:
            await engine.stop()

    uvloop.run(main())


def test_a_replica_does_not_wait_for_what_another_one_stores(small: Target) -> None:
    async def main() -> None:
        engine = await started(**small.tiers(200), data_parallel_size=2)
        try:
            pids = engine.worker_pids
            for rank in (0, 1):  # at once: what rank 0 has computed is still on its way into the tier
                answer = Answer()
                params = SamplingParams(max_tokens=1, temperature=0.0)
                request = GenerationRequest(
                    request_id=f"rank-{rank}", prompt_token_ids=PROMPT, params=params, data_parallel_rank=rank
                )
                engine.submit(request, answer.sink)
                assert await finished(answer) == small.expected[:1]
            assert engine.worker_pids == pids
            await settled(engine)
        finally:
            await engine.stop()

    uvloop.run(main())


def test_tiers_that_cannot_be_had_are_told_at_the_start(tmp_path: Path, small: Target) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for settings, words in (
        (small.tiers(10, {"type": "fs", "root_dir": str(blocked / "below")}), "fs"),
        (small.tiers(1_000_000_000), "does not fit"),
        (POOL | {"model": small.model, "kv_offloading_size": 1e-6}, "single block"),
        (small.tiers(10, {"type": "fs", "root_dir": str(tmp_path), "quota_bytes": 1000}), "quota_bytes 1000"),
    ):
        with pytest.raises(StartupError, match=words):
            uvloop.run(started(**settings))
