"""`Link`: the worker's end of the rings, doorbells and batch table. Imports no torch.

Owns every attached segment and descriptor. Whoever waits here also watches the lifeline: `EngineGone` is raised when
the engine's end of it closes.
"""

from __future__ import annotations

import contextlib
import select
import time
import traceback
from dataclasses import dataclass

from slipring.shm import wire
from slipring.shm.doorbell import Doorbell, Waiter
from slipring.shm.layout import Phase
from slipring.shm.ring import RingReader, RingWriter
from slipring.shm.segment import Segment
from slipring.shm.spec import WorkerConfig
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import Progress, Ready, SlotKind, StepInputView, StepOutputView, StepShape, WorkerError

_PROGRESS_EVERY_S = 0.05
_FULL_RING_PAUSE_S = 0.0002
_ERROR_PATIENCE_S = 2.0


class EngineGone(Exception):
    """The lifeline ended."""


@dataclass(frozen=True, slots=True)
class Step:
    """A published step that this worker has picked up and not yet given back."""

    step_id: int
    view: StepInputView
    picked_up_ns: int


class Link:
    """Single-threaded, like the loop that uses it."""

    def __init__(self, config: WorkerConfig) -> None:
        step_segment = Segment.attach(config.step_ring_fd, config.step_ring_bytes)
        output_segment = Segment.attach(config.output_ring_fd, config.output_ring_bytes)
        self._steps = RingReader(step_segment, config.reader_index)
        self._outputs = RingWriter(output_segment)
        table_shape = TableShape(config.num_rows, config.max_model_len, config.block_size)
        self.table = BatchTable(Segment.attach(config.table_fd, config.table_bytes), table_shape)
        shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
        self._inputs = [StepInputView(self._steps.payload(i), shape) for i in range(self._steps.num_slots)]
        self._output_views = [StepOutputView(self._outputs.payload(i), shape) for i in range(self._outputs.num_slots)]
        self._output_bytes = shape.output_bytes
        self._output_doorbell = Doorbell(config.output_doorbell_fd)
        self._waiter = Waiter(Doorbell(config.step_doorbell_fd), config.spin_us, config.lifeline_fd)
        self._lifeline = select.poll()
        self._lifeline.register(config.lifeline_fd, select.POLLIN)
        self._last_progress = 0.0
        self._step_id: int | None = None

    def beat(self, phase: Phase) -> None:
        self._steps.beat(phase)

    def next_step(self) -> Step | None:
        """The next step, as soon as it is published; None for SHUTDOWN. Raises EngineGone."""
        if not self._waiter.wait(self._step_is_there):
            raise EngineGone
        slot = self._steps.try_read()
        assert slot is not None
        kind, _, step_id, _ = self._steps.header(slot)
        if kind == SlotKind.SHUTDOWN:
            self._steps.advance()
            return None
        if kind != SlotKind.STEP:
            raise RuntimeError(f"the step ring holds a record of kind {kind}, which a worker cannot run")
        self._step_id = step_id
        return Step(step_id, self._inputs[slot], time.monotonic_ns())

    def claim_output(self) -> StepOutputView:
        """The output slot to fill."""
        return self._output_views[self._claim()]

    def publish_step(self, step: Step, output: StepOutputView) -> None:
        """Publish the claimed output and give the step's slot back."""
        output.times_ns[output.PICKED_UP] = step.picked_up_ns
        output.times_ns[output.PUBLISHED] = time.monotonic_ns()
        self._outputs.publish(SlotKind.STEP, self._output_bytes, step.step_id)
        self._output_doorbell.ring()
        self._steps.advance()
        self._step_id = None

    def publish_ready(self, ready: Ready) -> None:
        self._publish(SlotKind.READY, wire.encode(ready), self._claim())

    def progress(self, done: int, total: int) -> None:
        """Loading goes on: beat, and report now and then; a full ring is no reason to wait. Raises EngineGone."""
        self.beat(Phase.LOADING)
        now = time.monotonic()
        if now - self._last_progress < _PROGRESS_EVERY_S and done < total:
            return
        self._last_progress = now
        self._watch_lifeline()
        if (slot := self._outputs.try_claim()) is not None:
            self._publish(SlotKind.PROGRESS, wire.encode(Progress(done=done, total=total)), slot)

    def publish_error(self, error: BaseException) -> None:
        """The last word. Gives up quietly when the ring stays full or the engine is gone: stderr has the same."""
        text = "".join(traceback.format_exception(error))
        room = self._outputs.slot_bytes // 2
        # Four bytes a character at most: the record fits whatever the words are.
        message = f"{type(error).__name__}: {error}"[: room // 8]
        record = WorkerError(message=message, traceback=text[-(room // 8) :], step_id=self._step_id)
        with contextlib.suppress(EngineGone, TimeoutError):
            self._publish(SlotKind.ERROR, wire.encode(record), self._claim(_ERROR_PATIENCE_S))

    def _step_is_there(self) -> bool:
        return self._steps.try_read() is not None

    def _claim(self, patience_s: float | None = None) -> int:
        """A free output slot. The ring has a slot for every step in flight, so a wait here is rare and short.

        Raises EngineGone, or TimeoutError after `patience_s`.
        """
        began = time.monotonic()
        while (slot := self._outputs.try_claim()) is None:
            self._watch_lifeline()
            if patience_s is not None and time.monotonic() - began > patience_s:
                raise TimeoutError("the output ring stays full")
            time.sleep(_FULL_RING_PAUSE_S)
        return slot

    def _publish(self, kind: SlotKind, payload: bytes, slot: int) -> None:
        self._outputs.payload(slot)[: len(payload)] = payload
        self._outputs.publish(kind, len(payload), self._step_id or 0)
        self._output_doorbell.ring()

    def _watch_lifeline(self) -> None:
        if self._lifeline.poll(0):
            raise EngineGone
