"""Real processes that are killed in the middle of a transfer, through the engine: the same tokens, and no error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from slipring.runtime.stats import Stats
from slipring.runtime.tiers.file_store import FileStore
from tests.e2e.tier_rig import Answer, ask, finished, free_port, running, save_tiny_model, tiny, tiny_tiers
from tests.waits import settled

ROOT = Path(__file__).parents[2]
PROMPT = [4 + 7 * number % 250 for number in range(101)]
NUM_PAGES = 25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


class Child:
    def __init__(self, settings: dict[str, Any], die: str | None) -> None:
        task = json.dumps({"settings": settings, "prompts": [PROMPT], "die": die})
        command = [sys.executable, "-m", "tests.e2e.tier_child", task]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "READY\n"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def answered(settings: dict[str, Any]) -> tuple[Answer, Stats]:
    async def main() -> tuple[Answer, Stats]:
        async with running(settings) as (engine,):
            answer = ask(engine, "again", PROMPT, 8)
            await finished(answer)
            await settled(engine)
            return answer, engine.stats()

    return uvloop.run(main())


@pytest.fixture(scope="module")
def expected(model: str) -> list[int]:
    return answered(tiny(model))[0].tokens


def test_a_sibling_killed_in_the_middle_of_a_pull(model: str, expected: list[int]) -> None:
    port = free_port()
    serving = tiny(model, **tiny_tiers(100, {"type": "p2p", "port": port}))
    with Child(serving, die="page") as sibling:
        sibling.wait_ready()
        tier = {"type": "p2p", "peers": [f"127.0.0.1:{port}"], "num_threads": 1}
        answer, stats = answered(tiny(model, **tiny_tiers(100, tier)))
        assert sibling.process.wait(10) == -9
    assert stats.tiers is not None
    store = stats.tiers.stores[f"p2p:127.0.0.1:{port}"]
    assert answer.tokens == expected
    assert answer.num_cached == 20, "five pages of four tokens came through, and served"
    assert stats.tiers.tiers.reused_from == {f"p2p:127.0.0.1:{port}": 5}
    assert store.failed == NUM_PAGES - 5 == stats.tiers.tiers.failed


def test_a_process_killed_in_the_middle_of_a_store(tmp_path: Path, model: str, expected: list[int]) -> None:
    settings = tiny(model, **tiny_tiers(100, {"type": "fs", "root_dir": str(tmp_path), "quota_bytes": 1 << 20}))
    with Child(settings, die="store") as first:
        assert first.process.wait(60) == -9
    assert list(tmp_path.rglob("*.tmp")), "it died while it wrote"
    answer, stats = answered(settings)
    assert answer.tokens == expected
    assert answer.num_cached >= 4 and stats.tiers is not None and stats.tiers.stores["fs"].corrupt == 0
    pages = list(tmp_path.rglob("*.kv"))
    assert len(pages) >= NUM_PAGES and not list(tmp_path.rglob("*.tmp")), "and the dead one's rest is cleared away"
    store = FileStore(tmp_path, b"\0" * 32, 1)
    assert store.used_bytes == sum(page.stat().st_size for page in pages)
    store.close()
