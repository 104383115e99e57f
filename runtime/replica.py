"""One replica: a scheduler, its rings and batch table, its worker, and the step loop between them.

The loop (`_take_output`) runs once for each returned step:

    update    what came back changes the scheduler's state
    publish   the next step goes out, so that the device never waits for what follows
    deliver   tokens become text and reach their sinks (client I/O)
    settle    blocks that became full enter the prefix cache; rows get the blocks that they will soon need
    pace      if the pipeline has room, a timer for the moment shortly before the running step's end

With pipeline depth 1 the same code runs; `publish` then only finds room when nothing is in flight. Nothing polls:
an idle replica has no timer and waits for its doorbell.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from enum import Enum

import msgspec

from slipring.runtime.completion import Completion
from slipring.runtime.config import ResolvedConfig
from slipring.runtime.garbage import IdleCollector, NullCollector
from slipring.runtime.pacing import Pacer
from slipring.runtime.request import TokenLogprob
from slipring.runtime.worker_process import WorkerProcess
from slipring.scheduler.request import FinishReason, Request
from slipring.scheduler.scheduler import Scheduler
from slipring.scheduler.step import ProtocolError, Returned, Step
from slipring.shm import wire
from slipring.shm.doorbell import Doorbell, LoopWaiter
from slipring.shm.ring import RingReader, RingWriter, create_ring
from slipring.shm.segment import Segment
from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.shm.table import BatchTable
from slipring.shm.wire import SlotKind, StepInputView, StepOutputView, StepShape

logger = logging.getLogger(__name__)

_SPIN_US = 50
_CONTROL_BYTES = 16384
"""Room that a slot of the output ring has at least, for a worker's error record."""
_MIN_CHUNK = 64


class ReplicaState(Enum):
    """STARTING → SERVING → DEAD → CLOSED; CLOSING (asked to end) and CLOSED can follow any of them."""

    STARTING = "starting"
    SERVING = "serving"
    DEAD = "dead"
    CLOSING = "closing"
    CLOSED = "closed"


class ReplicaDeadError(Exception):
    """The worker is gone, or the replica cannot go on; the message says why."""

    def __init__(self, message: str, explained: bool = False) -> None:
        """`explained`: the worker itself said why, so that its last lines add nothing."""
        super().__init__(message)
        self.explained = explained


class Replica:
    """Everything in here runs on the event loop's thread."""

    def __init__(
        self,
        config: ResolvedConfig,
        spec: ModelSpec,
        on_progress: Callable[[wire.Progress], None],
        on_dead: Callable[[str], None],
    ) -> None:
        """Allocates the shared memory. Raises OSError when it is short."""
        self._config = config
        self._spec = spec
        self._on_progress = on_progress
        self._on_dead = on_dead
        self._depth = config.pipeline_depth
        self._step_shape = shape = StepShape.of(config.user.max_num_seqs, config.max_draft, config.user.block_size)
        self._segments: list[Segment] = []
        try:
            self.table = BatchTable(
                self._keep(Segment.create("batch table", config.table_shape.nbytes)), config.table_shape
            )
            slots, output_bytes = self._depth + 2, max(shape.output_bytes, _CONTROL_BYTES)
            self._steps = RingWriter(self._keep(create_ring("step ring", slots, shape.input_bytes, num_readers=1)))
            self._outputs = RingReader(self._keep(create_ring("output ring", slots, output_bytes, num_readers=1)))
        except OSError:
            self._free_segments()
            raise
        self._step_views = [StepInputView(self._steps.payload(i), shape) for i in range(self._steps.num_slots)]
        self._output_views = [StepOutputView(self._outputs.payload(i), shape) for i in range(self._outputs.num_slots)]
        self._step_bell, self._output_bell = Doorbell(), Doorbell()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[wire.Ready] = self._loop.create_future()
        self._pacer = Pacer()
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: LoopWaiter | None = None
        self._kick_scheduled = False
        self.state = ReplicaState.STARTING
        self.worker = WorkerProcess(self._on_worker_exit)
        self.collector: NullCollector | IdleCollector = NullCollector()
        self.scheduler: Scheduler

    # --- life ---------------------------------------------------------------------------------------------------

    def _keep(self, segment: Segment) -> Segment:
        self._segments.append(segment)
        return segment

    def _free_segments(self) -> None:
        while self._segments:
            self._segments.pop().close()

    async def start(self, timeout_s: float) -> wire.Ready:
        """Spawn the worker and wait until it is ready. Raises ReplicaDeadError, or OSError from the spawn."""
        ready = self._outputs_are_there
        self._waiter = LoopWaiter(self._loop, self._output_bell, ready, self._on_outputs, _SPIN_US)
        inherit = (
            self._steps.segment.fd,
            self._outputs.segment.fd,
            self.table.segment.fd,
            self._step_bell.fd,
            self._output_bell.fd,
        )
        self.worker.spawn(
            self._config.user.worker_module, self._worker_config, inherit, self._config.worker_environment()
        )
        try:
            ready = await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            state = self._steps.reader_state(0)
            raise ReplicaDeadError(
                f"the worker (pid {state.pid}) was not ready after {timeout_s:.0f} s; its phase is {state.phase.name}"
            ) from None
        return ready

    def begin(self, config: ResolvedConfig, num_blocks: int) -> None:
        """The pool's size is known: make the scheduler, and accept requests from now on. Raises ReplicaDeadError."""
        if self.state is not ReplicaState.STARTING:
            raise ReplicaDeadError(f"the replica is {self.state.value}")
        self._config = config
        self.scheduler = Scheduler(config.scheduler(num_blocks), self.table, self._spec.vocab_size)
        self.state = ReplicaState.SERVING

    def close(self) -> None:
        """Kill the worker, if it still lives, and give everything back. Idempotent."""
        if self.state is ReplicaState.CLOSED:
            return
        self.state = ReplicaState.CLOSED
        if self._waiter is not None:
            self._waiter.close()
        self._cancel_timer()
        self.worker.close()
        if not self._ready.done():
            self._ready.set_exception(ReplicaDeadError("the engine was stopped while it started"))
            self._ready.exception()  # nobody need be waiting for it
        for bell in (self._step_bell, self._output_bell):
            bell.close()
        self._free_segments()

    async def shut_down(self, timeout_s: float) -> None:
        """Ask the worker to end, and make sure that it does."""
        if self.state is not ReplicaState.CLOSED:
            self.state = ReplicaState.CLOSING
            self._cancel_timer()
            if self.worker.alive and self._steps.try_claim() is not None:
                self._steps.publish(SlotKind.SHUTDOWN, 0, 0)
                self._step_bell.ring()
        deadline = self._loop.time() + timeout_s
        while self.worker.alive and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        self.close()

    def _worker_config(self, lifeline_fd: int) -> WorkerConfig:
        config, user = self._config, self._config.user
        return WorkerConfig(
            model=self._spec,
            rank=0,
            parent_pid=os.getpid(),
            device=config.device,
            dtype=config.dtype,
            num_threads=config.num_threads,
            block_size=user.block_size,
            num_blocks=user.num_gpu_blocks_override,
            kv_cache_bytes=config.kv_cache_bytes,
            max_model_len=config.max_model_len,
            max_num_seqs=user.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_rows=config.num_rows,
            max_draft=config.max_draft,
            step_ring_fd=self._steps.segment.fd,
            step_ring_bytes=self._steps.segment.nbytes,
            output_ring_fd=self._outputs.segment.fd,
            output_ring_bytes=self._outputs.segment.nbytes,
            table_fd=self.table.segment.fd,
            table_bytes=self.table.segment.nbytes,
            step_doorbell_fd=self._step_bell.fd,
            output_doorbell_fd=self._output_bell.fd,
            lifeline_fd=lifeline_fd,
            reader_index=0,
            spin_us=_SPIN_US,
        )

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request in line. An idle replica wakes at once; requests of one loop turn share a step."""
        self.scheduler.add(request)
        self.wake()

    def wake(self) -> None:
        """There may be work again: look for it in the next turn of the loop."""
        if not self._kick_scheduled:
            self._kick_scheduled = True
            self._loop.call_soon(self._guarded, self._kick)

    def abort(self, request: Request) -> None:
        if self.state is ReplicaState.SERVING:
            self.scheduler.abort(request)

    def _kick(self) -> None:
        self._kick_scheduled = False
        self._pump()

    # --- the step loop ------------------------------------------------------------------------------------------

    def _outputs_are_there(self) -> bool:
        return self._outputs.try_read() is not None

    def _on_outputs(self) -> None:
        """Take what has come back, at most one pipeline's worth, so that the loop gets round to everybody else."""
        for _ in range(self._depth):
            slot = self._outputs.try_read()
            if slot is None:
                return
            self._guarded(self._take_output, slot)
            if self.state is ReplicaState.CLOSED:
                return  # somebody closed us from within a sink
            self._outputs.advance()
        if self._outputs_are_there():
            self._output_bell.ring()

    def _take_output(self, slot: int) -> None:
        """One returned step: update, publish, deliver, settle, pace. See the module's docstring for the order."""
        kind, length, step_id, _ = self._outputs.header(slot)
        if kind != SlotKind.STEP:
            self._on_control(kind, length, slot)
        elif self.state is ReplicaState.SERVING:
            returned = self.scheduler.update(self._output_views[slot], step_id)
            self._pacer.returned(time.monotonic())
            self._pump()
            self._deliver(returned, self._output_views[slot])
            self.scheduler.settle()
            self._rest()

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Run a part of the step loop; whatever it raises is this replica's fault and ends it, never silently."""
        try:
            work(*arguments)
        except (ProtocolError, msgspec.DecodeError) as error:
            self._fail(f"protocol fault between engine and worker: {error}")
        except Exception as error:
            logger.exception("the step loop raised")
            self._fail(f"internal error in the step loop: {error!r}")

    def _pump(self) -> None:
        """Publish as many steps as are due now; set the timer for the next one if the pipeline has room."""
        self._cancel_timer()
        scheduler = self.scheduler
        while self.state is ReplicaState.SERVING and scheduler.has_work and scheduler.num_in_flight < self._depth:
            if scheduler.num_in_flight:
                early_s = self._pacer.publish_at() - time.monotonic()
                if early_s > 0:
                    self._timer = self._loop.call_later(early_s, self._guarded, self._pump)
                    return
            if self._publish() is None:
                if not scheduler.num_in_flight:
                    raise RuntimeError("there is work, nothing is in flight, and nothing can be scheduled")
                return

    def _publish(self) -> Step | None:
        slot = self._steps.try_claim()
        if slot is None:
            return None  # the worker still holds every slot; its next output brings us back here
        step = self.scheduler.schedule(self._step_views[slot])
        if step is None:
            return None  # rows or blocks must come back first
        self._steps.publish(SlotKind.STEP, self._step_shape.input_bytes, step.step_id)
        self._step_bell.ring()
        if self._waiter is not None:
            self._waiter.expect()
        now = time.monotonic()
        self._pacer.published(step, now)
        if self.scheduler.admitted:
            self._note_admissions(now)
        return step

    def _note_admissions(self, now: float) -> None:
        for request in self.scheduler.admitted:
            if request.owner is not None:
                request.owner.scheduled_at = now
        self.scheduler.admitted.clear()

    def _deliver(self, returned: Returned, view: StepOutputView) -> None:
        now = time.monotonic()
        ends, drawn = returned.finished, zip(returned.requests, returned.tokens, returned.places, strict=True)
        for index, (request, token, place) in enumerate(drawn):
            completion: Completion | None = request.owner
            if completion is None or completion.finished:
                continue  # a sink of this very step has aborted it, or a stop string in it has ended it
            reason, stop_token = ends.get(index, (None, None)) if ends else (None, None)
            if reason is FinishReason.ERROR:
                completion.finish(reason, now, error="the model's output was not finite for this request")
                continue
            logprobs = (self._logprob(view, place, token, request),) if completion.wants_logprobs else None
            if completion.push(token, logprobs, reason, stop_token, now):
                self.scheduler.abort(request)
        self._size_chunks()

    def _logprob(self, view: StepOutputView, place: int, token: int, request: Request) -> TokenLogprob:
        count = request.params.logprobs
        ids, values = view.top_ids[place, :count].tolist(), view.top_logprobs[place, :count].tolist()
        top = tuple(zip(ids, values, strict=True))
        return TokenLogprob(token, float(view.logprob[place]), int(view.rank[place]), top)

    def _size_chunks(self) -> None:
        scheduler = self.scheduler
        scheduler.mixed_chunk = self._pacer.cost.chunk_within(
            self._config.itl_target_s,
            scheduler.decode.num,
            self._pacer.num_context,
            least=_MIN_CHUNK,
            most=scheduler.config.max_mixed_chunk,
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self) -> None:
        idle = not self.scheduler.num_in_flight
        self.collector.after_step(idle)
        if idle and self._config.user.debug_integrity:
            self.scheduler.check_integrity()

    # --- faults -------------------------------------------------------------------------------------------------

    def _on_control(self, kind: int, length: int, slot: int) -> None:
        payload = self._outputs.payload(slot)
        if kind == SlotKind.PROGRESS:
            self._on_progress(wire.decode(payload, length, wire.Progress))
        elif kind == SlotKind.READY and not self._ready.done():
            self._ready.set_result(wire.decode(payload, length, wire.Ready))
        elif kind == SlotKind.ERROR:
            error: wire.WorkerError = wire.decode(payload, length, wire.WorkerError)
            self._fail(f"the worker failed: {error.message}", explained=True)
        else:
            raise ProtocolError(f"unknown record kind {kind}")

    def _on_worker_exit(self, status: int) -> None:
        if self.state in (ReplicaState.CLOSING, ReplicaState.CLOSED):
            return
        while self._outputs_are_there() and self.state in (ReplicaState.STARTING, ReplicaState.SERVING):
            self._on_outputs()  # outputs that were published before the end still count
        self._fail(f"the worker (pid {self.worker.pid}) {self.worker.describe_exit(status)}")

    def _fail(self, reason: str, explained: bool = False) -> None:
        """The replica is dead: nothing more is published, and whoever waits is told."""
        if self.state not in (ReplicaState.STARTING, ReplicaState.SERVING):
            return
        self.state = ReplicaState.DEAD
        self._cancel_timer()
        self.worker.kill()
        if self._ready.done():
            self._on_dead(reason)
        else:
            self._ready.set_exception(ReplicaDeadError(reason, explained))
