"""`slipring blackbox FILE`: what a flight record tells, in words or as JSON."""

from __future__ import annotations

import sys

from slipring.runtime.flight_recorder import Record, StepRecord, read_record

_MOST_REQUESTS = 8


def blackbox(path: str, as_json: bool) -> int:
    """Print it; returns the exit status."""
    try:
        record = read_record(path)
        if as_json:
            with open(path) as file:
                print(file.read())
        else:
            print(tell(record))
    except (OSError, ValueError) as error:
        print(f"slipring: {error}", file=sys.stderr)
        return 1
    return 0


def tell(record: Record) -> str:
    lines = [
        f"{record.time}  replica {record.replica}, epoch {record.epoch}: {record.event}",
        f"  {record.reason}",
        f"  The worker (pid {record.worker_pid}) was {record.phase}, last heard of {record.silent_s:.3f} s before.",
        f"  {record.num_running} requests were running and {record.num_waiting} waiting.",
        "",
        "The last steps, oldest first:" if record.steps else "No step had been published.",
    ]
    for step in record.steps:
        lines += _tell_step(step)
    if record.traceback:
        lines += ["", "What the worker said of its error:", *_indented(record.traceback.splitlines())]
    if record.last_lines:
        lines += ["", "What the worker wrote last:", *_indented(record.last_lines)]
    return "\n".join(lines)


def _tell_step(step: StepRecord) -> list[str]:
    what = f"{step.num_tokens} tokens of {step.num_rows} rows ({step.num_decode} in decode)"
    head = f"  step {step.step_id}, published {step.published_s:.3f} s before: {what}"
    if not step.returned:
        requests = list(dict.fromkeys(entry.request for entry in step.entries if entry.request))
        shown = ", ".join(requests[:_MOST_REQUESTS]) + (" ..." if len(requests) > _MOST_REQUESTS else "")
        return [f"{head}; never came back", *([f"    it computed {shown}"] if shown else [])]
    assert step.took_s is not None and step.forward_s is not None and step.sample_s is not None
    times = f"{step.took_s * 1e3:.1f} ms (forward {step.forward_s * 1e3:.1f}, sampling {step.sample_s * 1e3:.1f})"
    return [f"{head}; came back after {times}"]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
