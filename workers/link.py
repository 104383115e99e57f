"""`Link`: the worker's end of the rings, doorbells and batch table. Imports no torch.

Several steps may be taken before the first is published; they are published, and their slots given back, in order.
Taking is one thread's business, publishing one thread's too, which may be another.

Owns every attached segment and descriptor. Whoever waits here also watches the lifeline: `EngineGone` is raised when
the engine's end of it closes.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from slipring.shm import wire
from slipring.shm.control import ControlEnd
from slipring.shm.doorbell import Doorbell, Waiter
from slipring.shm.layout import Phase
from slipring.shm.life_lock import LifeLock
from slipring.shm.ring import RingReader, RingWriter
from slipring.shm.segment import Segment
from slipring.shm.spec import WorkerConfig
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import Progress, Ready, SlotKind, StepInputView, StepOutputView, StepShape, WorkerError

_PROGRESS_EVERY_S = 0.05
_FULL_RING_PAUSE_S = 0.0002
_RECORD_OVERHEAD = 256
"""Bytes of a slot that an error record needs besides its words."""
_ERROR_PATIENCE_S = 2.0
_IDLE_AFTER_S = 0.05
"""Without a step for so long, a worker does what it has put off."""


class StartRefused(RuntimeError):
    """The worker cannot start as it was told, and the message says all that a person needs: no traceback."""


class EngineGone(Exception):
    """The lifeline ended."""


@dataclass(frozen=True, slots=True)
class Step:
    """A published step that this worker has picked up and not yet given back."""

    step_id: int
    view: StepInputView
    picked_up_ns: int


class Link:
    """One thread takes steps, one publishes them; `fail` may be called by either."""

    def __init__(self, config: WorkerConfig) -> None:
        """By the main thread: the engine takes its end for the worker's."""
        if config.life_lock_fd >= 0:
            self._life = LifeLock.attach(config.life_lock_fd)
            self._life.hold()
        step_segment = Segment.attach(config.step_ring_fd, config.step_ring_bytes)
        output_segment = Segment.attach(config.output_ring_fd, config.output_ring_bytes)
        self._step_segment = step_segment
        self._steps = RingReader(step_segment, config.reader_index)
        self._outputs = RingWriter(output_segment)
        table_shape = TableShape(config.num_rows, config.max_model_len, config.block_size)
        self.table = BatchTable(Segment.attach(config.table_fd, config.table_bytes), table_shape)
        shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
        self._inputs = [StepInputView(self._steps.payload(i), shape) for i in range(self._steps.num_slots)]
        self._output_views = [StepOutputView(self._outputs.payload(i), shape) for i in range(self._outputs.num_slots)]
        self._output_bytes = shape.output_bytes
        self._output_doorbell = Doorbell(config.output_doorbell_fd)
        self._step_doorbell = Doorbell(config.step_doorbell_fd)
        self._waiter = Waiter(self._step_doorbell, config.spin_us, config.lifeline_fd)
        self._lifeline_fd = config.lifeline_fd
        self._config = config
        self._last_progress = 0.0
        self._cursor = threading.Lock()
        """Held while `_in_flight` and the ring's cursor disagree."""
        self._in_flight: deque[int] = deque()
        """Ids of the steps that were taken and not given back, oldest first."""
        self._failure: BaseException | None = None

    @property
    def read_by_device(self) -> list[memoryview]:
        """The shared memory that a device copies from: step ring and batch table."""
        return [self._step_segment.buf, self.table.segment.buf]

    def open_control(self) -> tuple[ControlEnd, Waiter]:
        """This worker's end of the control channel, and the wait for what comes; for one thread of their own."""
        config = self._config
        incoming = RingReader(Segment.attach(config.control_ring_fd, config.control_ring_bytes))
        outgoing = RingWriter(Segment.attach(config.reply_ring_fd, config.reply_ring_bytes))
        waiter = Waiter(Doorbell(config.control_doorbell_fd), max_spin_us=0, also_watch=config.lifeline_fd)
        return ControlEnd(outgoing, incoming, Doorbell(config.reply_doorbell_fd)), waiter

    def beat(self, phase: Phase) -> None:
        self._steps.beat(phase)

    def next_step(self, meanwhile: Callable[[Callable[[], bool]], bool] | None = None) -> Step | None:
        """The next step, as soon as it is published; None for SHUTDOWN. Raises EngineGone, or what `fail` was given.

        While none comes, `meanwhile` is called (see `executor.Meanwhile`) until it answers False.
        """
        while meanwhile is not None and not self._waiter.wait(self._may_go_on, _IDLE_AFTER_S):
            self._watch_lifeline()
            if not meanwhile(self._may_go_on):
                break
        if not self._waiter.wait(self._may_go_on):
            raise EngineGone
        if self._failure is not None:
            raise self._failure
        slot = self._next_slot()
        assert slot is not None
        kind, _, step_id, _ = self._steps.header(slot)
        if kind == SlotKind.SHUTDOWN:
            if not self._in_flight:
                self._steps.advance()
            return None
        if kind != SlotKind.STEP:
            raise RuntimeError(f"the step ring holds a record of kind {kind}, which a worker cannot run")
        with self._cursor:
            self._in_flight.append(step_id)
        return Step(step_id, self._inputs[slot], time.monotonic_ns())

    def claim_output(self) -> StepOutputView:
        """The output slot to fill."""
        return self._output_views[self._claim()]

    def fail(self, error: BaseException) -> None:
        """Make `next_step` raise, wherever it waits: the publishing thread cannot go on."""
        self._failure = error
        self._step_doorbell.ring()

    def publish_step(self, step: Step, output: StepOutputView) -> None:
        """Publish the claimed output and give the step's slot back. In the order in which steps were taken."""
        output.times_ns[output.PICKED_UP] = step.picked_up_ns
        output.times_ns[output.PUBLISHED] = time.monotonic_ns()
        self._outputs.publish(SlotKind.STEP, self._output_bytes, step.step_id)
        self._output_doorbell.ring()
        with self._cursor:
            self._steps.advance()
            self._in_flight.popleft()

    def publish_ready(self, ready: Ready) -> None:
        ready = msgspec.structs.replace(ready, epoch=self._config.epoch)
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

    def still_loading(self) -> None:
        """A sign of life while another worker loads. Raises EngineGone."""
        self.beat(Phase.LOADING)
        self._watch_lifeline()

    def publish_error(self, error: BaseException) -> None:
        """The last word. Gives up quietly when the ring stays full or the engine is gone: stderr has the same."""
        text = "".join(traceback.format_exception(error))
        room = self._outputs.slot_bytes - _RECORD_OVERHEAD
        words = str(error) if isinstance(error, StartRefused) else f"{type(error).__name__}: {error}"
        # Four bytes a character at most: the record fits whatever the words are.
        message = words[: room // 6]
        record = WorkerError(message=message, traceback=text[-(room // 12) :], step_id=self._oldest())
        with contextlib.suppress(EngineGone, TimeoutError):
            self._publish(SlotKind.ERROR, wire.encode(record), self._claim(_ERROR_PATIENCE_S))

    def _next_slot(self) -> int | None:
        """The slot after those in flight, if it is published."""
        with self._cursor:
            return self._steps.try_read(len(self._in_flight))

    def _may_go_on(self) -> bool:
        return self._next_slot() is not None or self._failure is not None

    def _oldest(self) -> int | None:
        """The id of the step that an error is about."""
        with self._cursor:
            return self._in_flight[0] if self._in_flight else None

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
        self._outputs.publish(kind, len(payload), self._oldest() or 0)
        self._output_doorbell.ring()

    def _watch_lifeline(self) -> None:
        # Made anew: both threads come here, and a poll object serves one at a time.
        poll = select.poll()
        poll.register(self._lifeline_fd, select.POLLIN)
        if poll.poll(0):
            raise EngineGone
