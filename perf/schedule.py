"""`schedule()` with the write into the ring slot and its publication, by number of rows and kind of step."""

from __future__ import annotations

import gc
import statistics
import time

import numpy as np

from perf.control_plane import ControlPlane
from perf.figure import Measurement, Options, percentile

DESCRIPTION = "one scheduling step, written to the ring: microseconds by rows and kind of step"
ROWS = (1, 8, 64, 256, 512, 1024)
PUBLISHED_US = {"C++ scheduler (published)": 18.0, "Python scheduler it replaced (published)": 1200.0}


def measure(options: Options) -> Measurement:
    steps = 2_000 if options.quick else 100_000
    runs = 1 if options.quick else 5
    summary: dict[str, float | int] = {}
    table, samples = [], {}
    for rows in ROWS:
        count = steps if rows == 256 else max(2_000, steps // 10)
        times = [_pure_decode(rows, count, options.seed + run) for run in range(runs)]
        row = _summarize(f"decode, {rows} rows", times)
        summary[f"schedule_p50_us_{rows}"] = row["p50_us"]
        if rows == 256:
            summary["schedule_p99_us_256"] = row["p99_us"]
            samples["decode_256_us"] = [round(float(t), 2) for t in times[-1][:: max(1, count // 500)]]
        table.append(row)
    for name, times in _mixed(options.seed, 300 if options.quick else 2000).items():
        table.append(_summarize(name, [times]))
    notes = "; ".join(f"{name}: {us:g} us" for name, us in PUBLISHED_US.items())
    return Measurement(summary, table, samples, notes)


def _summarize(name: str, runs: list[np.ndarray]) -> dict:
    """The median of the runs of each percentile; the worst of all maxima."""
    return {
        "step": name,
        "p50_us": round(statistics.median(percentile(run, 50) for run in runs), 2),
        "p99_us": round(statistics.median(percentile(run, 99) for run in runs), 2),
        "max_us": round(max(float(run.max()) for run in runs), 1),
    }


def _pure_decode(rows: int, steps: int, seed: int) -> np.ndarray:
    """Microseconds of each `schedule()`. Rows that would leave the context start again, outside of the clock."""
    length = 4096 if rows <= 256 else 2048
    plane = ControlPlane(rows, max_model_len=length, seed=seed, max_tokens=length - 64)
    plane.decode_until_steady(rows)
    times = np.zeros(steps)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        done = 0
        while done < steps:
            if int(plane.scheduler.decode.start[:rows].max()) >= length - 80:
                plane = ControlPlane(rows, max_model_len=length, seed=seed + done, max_tokens=length - 64)
                plane.decode_until_steady(rows)
            began = time.perf_counter_ns()
            step = plane.schedule()
            times[done] = (time.perf_counter_ns() - began) / 1e3
            assert step is not None and step.num_decode == step.num_rows == rows
            assert (step.view.num_tokens[:rows] == 1).all()
            plane.answer(step)
            plane.update(step)
            plane.scheduler.settle()
            done += 1
    finally:
        gc.enable()
        gc.unfreeze()
    plane.scheduler.check_integrity()
    return times


def _mixed(seed: int, steps: int) -> dict[str, np.ndarray]:
    """256 rows with, in each step, one chunk of a long prompt, one admission, or ends of requests."""
    return {
        "256 rows and a chunk of a long prompt": _with_arrivals(seed, steps, length=3000, max_tokens=2),
        "256 rows, one admission and one end": _with_arrivals(seed, steps, length=40, max_tokens=2),
        "256 rows, 16 admissions and 16 ends": _with_arrivals(seed, steps // 4, length=40, max_tokens=2, at_once=16),
    }


def _with_arrivals(seed: int, steps: int, length: int, max_tokens: int, at_once: int = 1) -> np.ndarray:
    plane = ControlPlane(320, max_model_len=8192, seed=seed, max_tokens=8000)
    plane.decode_until_steady(256)
    times = np.zeros(steps)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for index in range(steps):
            if plane.scheduler.num_waiting == 0 and not plane.scheduler._prefilling:
                for _ in range(at_once):
                    plane.add(length, max_tokens)
            began = time.perf_counter_ns()
            step = plane.schedule()
            times[index] = (time.perf_counter_ns() - began) / 1e3
            assert step is not None and step.num_chunk_tokens > 0 and step.num_decode >= 256
            plane.answer(step)
            plane.update(step)
            plane.scheduler.settle()
    finally:
        gc.enable()
        gc.unfreeze()
    plane.scheduler.check_integrity()
    return times
