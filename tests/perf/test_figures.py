"""The tables on the pages are those of `perf/results`, every figure keeps its promised keys, and the harness runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from perf.figure import FIGURES, RESULTS, ROOT, Options
from perf.render import PAGES, render, table_of
from perf.speculation import WORKLOADS, cells

PROMISED = {
    "schedule": [f"schedule_p50_us_{rows}" for rows in (1, 8, 64, 256, 512, 1024)] + ["schedule_p99_us_256"],
    "update": ["update_p50_us_256", "update_detok_us_per_token"],
    "ring": ["spin_rtt_p50_us", "loop_rtt_p50_us", "zmq_rtt_p50_us", "mpqueue_rtt_p50_us"],
    "frontend": ["engine_cpu_us_per_token_256", "burst_1000x4_seconds", "burst_errors"],
    "connections": ["streams", "errors", "itl_p99_ms", "bytes_per_connection"],
    "startup": ["first_token_seconds"],
    "idle": ["cpu_percent"],
}


def test_the_pages_show_what_was_measured() -> None:
    assert render(check=True) == 0, "run `python -m perf render`"
    shown = "".join(page.read_text() for page in PAGES)
    assert not [path.stem for path in RESULTS.glob("*.json") if f"<!-- perf:{path.stem} -->" not in shown]


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_results_hold_the_promised_keys_and_say_where_they_come_from(name: str) -> None:
    record = json.loads((RESULTS / f"{name}.json").read_text())
    assert set(PROMISED[name]) <= set(record["summary"])
    assert not record["quick"] and record["commit"] and record["machine"]["cores"] and record["versions"]["python"]


def test_a_changed_result_is_noticed(tmp_path, monkeypatch) -> None:
    record = json.loads((RESULTS / "idle.json").read_text())
    record["table"][0]["seconds"] = 12345
    (tmp_path / "idle.json").write_text(json.dumps(record))
    monkeypatch.setattr("perf.render.RESULTS", tmp_path)
    assert "12345" in table_of("idle")


@pytest.mark.parametrize("name", ["schedule", "update", "ring"])
def test_a_quick_run_prints_its_summary_last(name: str) -> None:
    command = [sys.executable, "-m", "perf", "run", name, "--quick", "--compare"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert set(PROMISED[name]) <= set(json.loads(result.stdout.splitlines()[-1]))


def test_list_names_every_figure() -> None:
    result = subprocess.run([sys.executable, "-m", "perf", "list"], cwd=ROOT, capture_output=True, text=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(FIGURES)


def test_parts_of_the_speculation_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECULATION_HEAD", raising=False)

    def named(only: str | None) -> list[tuple[str, str]]:
        return cells(Options(compare=False, seed=1, quick=True, only=only))

    assert {workload for _, workload in named(None)} == set(WORKLOADS)
    assert named("ngram,free") == [("ngram", "free")]
    assert named("structured") == [(method, "structured") for method in ("ngram", "suffix", "grammar")]
    with pytest.raises(SystemExit, match="'sufix' is no method and no workload"):
        named("ngram,sufix")
