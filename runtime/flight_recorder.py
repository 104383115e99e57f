"""The flight recorder: what the rings still hold when an epoch ends, written to one file.

A record says which steps were published last, what was in them, which came back and how long they took, what the
worker was doing, and why it ended. It holds ids, counts and times, never a prompt, a token or a text. It is bounded: at
most `_MOST_ENTRIES` rows of a step, `_MOST_FILES` files in the directory. Whatever goes wrong in here is a warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from pathlib import Path

import msgspec

from slipring.runtime.epoch import Epoch
from slipring.runtime.fault import Fault
from slipring.runtime.step_loop import StepLoop
from slipring.shm.layout import Phase
from slipring.shm.ring import Ring
from slipring.shm.wire import SlotKind, StepFlag, StepInputView, StepOutputView

logger = logging.getLogger(__name__)

_VERSION = 1
_MOST_ENTRIES = 64
_MOST_FILES = 16
_MOST_LINES = 40
_MOST_CHARACTERS = 4000


class Entry(msgspec.Struct, frozen=True):
    """One row of a step."""

    row: int
    generation: int
    request: str | None
    """Its id, if it is still live."""
    start: int
    num_tokens: int
    num_draft: int
    flags: list[str]


class StepRecord(msgspec.Struct, frozen=True):
    step_id: int
    published_s: float
    """Before the fault was seen."""
    num_rows: int
    num_decode: int
    num_tokens: int
    returned: bool
    took_s: float | None
    """From the worker's pick-up to its publication."""
    forward_s: float | None
    sample_s: float | None
    entries: list[Entry]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What one file holds."""

    version: int = _VERSION
    time: str
    replica: int
    epoch: int
    event: str
    reason: str
    traceback: str
    worker_pid: int
    phase: str
    silent_s: float
    """Since the worker's last sign of life, when the fault was seen."""
    limit_s: float = 0.0
    """Of a hang: how long that might have been."""
    num_running: int
    num_waiting: int
    steps: list[StepRecord]
    """Oldest first."""
    last_lines: list[str]


class FlightRecorder:
    def __init__(self, directory: str | None) -> None:
        """`directory` None: a folder of this user's in the temporary directory."""
        self._directory = Path(directory) if directory else Path(tempfile.gettempdir()) / f"slipring-{os.getuid()}"

    def write(self, record: Record) -> Path | None:
        """In any thread. The file, or None when it could not be written."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = self._directory / f"fault-{stamp}-{os.getpid()}-replica{record.replica}-epoch{record.epoch}.json"
            unfinished = path.with_suffix(".part")
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
            unfinished.rename(path)
            self._forget_old()
            return path
        except Exception as error:
            logger.warning("the flight recorder could not write to %s: %r", self._directory, error)
            return None

    def _forget_old(self) -> None:
        files = sorted(self._directory.glob("fault-*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST_FILES]:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def read_record(path: str) -> Record:
    """Raises OSError, or ValueError when it is no record."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no flight record: {error}") from None


def record_of(rank: int, loop: StepLoop, fault: Fault) -> Record | None:
    """Of an epoch's end, before its rings are gone; None when they cannot be read any more."""
    try:
        return _record_of(rank, loop, fault)
    except Exception as error:
        logger.warning("the flight recorder could not read the epoch's rings: %r", error)
        return None


def _record_of(rank: int, loop: StepLoop, fault: Fault) -> Record:
    epoch = loop.epoch
    now_ns = time.monotonic_ns()
    worker = epoch.steps.reader_state(0)
    scheduler = loop.scheduler
    return Record(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        replica=rank,
        epoch=epoch.number,
        event=fault.event.value,
        reason=fault.reason[:_MOST_CHARACTERS],
        traceback=fault.traceback[-_MOST_CHARACTERS:],
        worker_pid=epoch.worker.pid,
        phase=Phase(worker.phase).name.lower(),
        silent_s=round(fault.silent_s or (now_ns - worker.heartbeat_ns) / 1e9, 4),
        limit_s=round(fault.limit_s, 4),
        num_running=0 if scheduler is None else scheduler.num_running,
        num_waiting=0 if scheduler is None else scheduler.num_waiting,
        steps=_steps(loop, now_ns),
        last_lines=[line[:500] for line in list(epoch.worker.last_lines)[-_MOST_LINES:]],
    )


def _steps(loop: StepLoop, now_ns: int) -> list[StepRecord]:
    outputs = _outputs(loop.epoch)
    found = []
    for slot, kind, step_id, publish_ns in _recent(loop.epoch.steps):
        if kind == SlotKind.STEP:
            view, output = loop.epoch.step_views[slot], outputs.get(step_id)
            found.append(_step(loop, view, step_id, (now_ns - publish_ns) / 1e9, output))
    return found


def _step(loop: StepLoop, view: StepInputView, step_id: int, ago_s: float, output: StepOutputView | None) -> StepRecord:
    num_rows, num_decode, _, num_tokens = view.header[:4].tolist()
    times = None if output is None else (output.times_ns / 1e9).round(6).tolist()
    return StepRecord(
        step_id=step_id,
        published_s=round(ago_s, 6),
        num_rows=num_rows,
        num_decode=num_decode,
        num_tokens=num_tokens,
        returned=times is not None,
        took_s=None if times is None else round(times[StepOutputView.PUBLISHED] - times[StepOutputView.PICKED_UP], 6),
        forward_s=None if times is None else times[StepOutputView.FORWARD],
        sample_s=None if times is None else times[StepOutputView.SAMPLE],
        entries=[_entry(loop, view, at) for at in range(min(num_rows, _MOST_ENTRIES))],
    )


def _entry(loop: StepLoop, view: StepInputView, at: int) -> Entry:
    row, generation = int(view.rows[at]), int(view.generation[at])
    request = None if loop.scheduler is None else loop.scheduler.request_at(row, generation)
    return Entry(
        row=row,
        generation=generation,
        request=request.owner.request_id if request is not None and request.owner is not None else None,
        start=int(view.start[at]),
        num_tokens=int(view.num_tokens[at]),
        num_draft=int(view.num_draft[at]),
        flags=[flag.name or "" for flag in StepFlag if int(view.flags[at]) & flag],
    )


def _outputs(epoch: Epoch) -> dict[int, StepOutputView]:
    """By step id."""
    recent = _recent(epoch.outputs)
    return {step_id: epoch.output_views[slot] for slot, kind, step_id, _ in recent if kind == SlotKind.STEP}


def _recent(ring: Ring) -> list[tuple[int, int, int, int]]:
    """(slot, kind, step id, publication time) of what the ring still holds, oldest first."""
    first = max(0, ring.published - ring.num_slots)
    found = []
    for sequence in range(first, ring.published):
        slot = sequence % ring.num_slots
        kind, _, step_id, publish_ns = ring.header(slot)
        found.append((slot, kind, step_id, publish_ns))
    return found
