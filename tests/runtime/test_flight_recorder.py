"""What is written when a worker breaks, and how it is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipring.http.blackbox import tell
from slipring.runtime.flight_recorder import read_record
from tests.runtime.test_engine import ask, healthy, run, running, submit
from tests.runtime.test_recovery import given
from tests.serving import ROOT


def one_fault(folder: Path, blow: signal.Signals = signal.SIGKILL, times: int = 1) -> list[Path]:
    async def scenario() -> None:
        async with running({"step_s": 0.003}, flight_recorder_dir=str(folder), hang_limit_s=0.3) as engine:
            stream = submit(engine, ask([1, 2, 3], 400, request_id="the-one"))
            for _ in range(times):
                await given([stream], len(stream.deltas) + 12)
                before = engine.worker_pids
                os.kill(before[0], blow)
                while engine.worker_pids == before:
                    await asyncio.sleep(0.002)
                await healthy(engine)

    run(scenario())
    return sorted(folder.iterdir())


def test_a_fault_is_told_step_by_step(tmp_path: Path) -> None:
    (path,) = one_fault(tmp_path / "new" / "folder")
    record = read_record(str(path))
    assert record.event == "worker exit" and "SIGKILL" in record.reason and record.num_running == 1
    assert record.phase in ("running", "waiting") and 0 <= record.silent_s < 10
    assert len(record.steps) == 8 and [step.step_id for step in record.steps] == sorted(s.step_id for s in record.steps)
    assert record.steps[0].returned and not record.steps[-1].returned
    assert record.steps[-1].entries[0].request == "the-one" and record.steps[-1].entries[0].num_tokens == 1
    text = tell(record)
    assert "never came back" in text and "it computed the-one" in text and "came back after" in text
    assert path.stat().st_size < 1 << 20 and path.parent.stat().st_mode & 0o077 == 0
    printed = [
        subprocess.run(
            [sys.executable, "-m", "slipring.http.cli", "blackbox", str(path), *flags],
            capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout
        for flags in ([], ["--json"])
    ]  # fmt: skip
    assert printed[0].strip() == text and json.loads(printed[1])["event"] == "worker exit"


def test_a_hang_says_how_long_nothing_was_heard(tmp_path: Path) -> None:
    (path,) = one_fault(tmp_path, signal.SIGSTOP)
    record = read_record(str(path))
    assert record.event == "hang" and record.silent_s >= record.limit_s >= 0.3 and "hangs" in record.reason


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    for number in range(20):
        old = tmp_path / f"fault-2020-{number:02}.json"
        old.write_text("{}")
        os.utime(old, (number, number))
    (tmp_path / "mine.json").write_text("{}")
    names = [path.name for path in one_fault(tmp_path)]
    assert len([name for name in names if name.startswith("fault-")]) == 16 and "mine.json" in names
    assert any(str(time.localtime().tm_year) in name for name in names) and "fault-2020-00.json" not in names


def test_a_folder_that_cannot_be_written_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        one_fault(tmp_path / "file" / "below")


def test_what_is_no_record_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from slipring.http.blackbox import blackbox

    (tmp_path / "x").write_text("[]")
    assert blackbox(str(tmp_path / "x"), False) == 1 and blackbox(str(tmp_path / "none"), True) == 1
    assert "no flight record" in (err := capsys.readouterr().err) and "none" in err
