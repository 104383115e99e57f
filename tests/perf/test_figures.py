"""The tables on the pages are those of `perf/results`, every figure keeps its promised keys, and the harness runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from perf.figure import FIGURES, RESULTS, ROOT, Options
from perf.render import PAGES, render, table_of
from perf.speculation import WORKLOADS, cells
from perf.tier_engine import BLOCK_BYTES
from perf.tier_talks import ANSWER_TOKENS, NUM_TALKS, NUM_TURNS, OPENING_TOKENS, QUESTION_TOKENS, kinds_of

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


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        result = subprocess.run([sys.executable, "-m", "perf", "list"], cwd=ROOT, stdout=output, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, b"")


def test_parts_of_the_speculation_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECULATION_HEAD", raising=False)

    def named(only: str | None) -> list[tuple[str, str]]:
        return cells(Options(compare=False, seed=1, quick=True, only=only))

    assert {workload for _, workload in named(None)} == set(WORKLOADS)
    assert named("ngram,free") == [("ngram", "free")]
    assert named("structured") == [(method, "structured") for method in ("ngram", "suffix", "grammar", "eagle")]
    with pytest.raises(SystemExit, match="'sufix' is no method and no workload"):
        named("ngram,sufix")


@pytest.mark.parametrize("num_talks", [8, NUM_TALKS])
def test_conversations_of_the_tiers_figure_fit_where_they_shall(num_talks: int) -> None:
    num_blocks = (OPENING_TOKENS + NUM_TURNS * (QUESTION_TOKENS + ANSWER_TOKENS)) // 16
    kinds = {kind.name: kind for kind in kinds_of(num_talks, "/kv")}

    def pool(name: str) -> int:
        return kinds[name].settings["num_gpu_blocks_override"] // num_blocks

    def cpu_tier(name: str) -> dict[str, Any]:
        return json.loads(kinds[name].settings["kv_transfer_config"])["kv_connector_extra_config"]

    assert pool("cpu") == pool("fs") == pool("recomputed") == num_talks // 8
    assert kinds["recomputed"].settings["enable_prefix_caching"] is False, "each finds nothing when its turn comes"
    assert num_talks / kinds["device"].step <= pool("device"), "each finds everything"
    assert cpu_tier("cpu")["cpu_bytes_to_use"] // BLOCK_BYTES >= num_talks * num_blocks
    assert cpu_tier("fs")["cpu_bytes_to_use"] // BLOCK_BYTES == pool("fs") * num_blocks
    assert cpu_tier("fs")["secondary_tiers"][0]["root_dir"] == "/kv"
