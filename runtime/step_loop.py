"""The step loop of one epoch: between the scheduler and the rings. Ends with its epoch.

`_take_output` runs once for each returned step:

    update    what came back changes the scheduler's state
    publish   the next step goes out, so that the device never waits for what follows
    deliver   tokens become text and reach their sinks (client I/O)
    settle    blocks that became full enter the prefix cache; rows get the blocks that they will soon need
    pace      if the pipeline has room, a timer for the moment shortly before the running step's end

With pipeline depth 1 the same code runs; `publish` then only finds room when nothing is in flight. Nothing polls:
an idle loop has no timer and waits for its doorbell. Whatever goes wrong in here is told once, through `on_fault`;
from then on nothing is published, and `salvage` takes what the worker had published before its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec

from slipring.runtime.completion import Completion
from slipring.runtime.config import ResolvedConfig
from slipring.runtime.deadlines import StepDeadline
from slipring.runtime.delivery import deliver
from slipring.runtime.epoch import SPIN_US, Epoch
from slipring.runtime.fault import Fault
from slipring.runtime.garbage import IdleCollector, NullCollector
from slipring.runtime.pacing import Pacer
from slipring.runtime.supervisor import Event
from slipring.runtime.worker_grammars import WorkerGrammars
from slipring.scheduler.offload.transfers import TransferKind
from slipring.scheduler.request import FinishReason, Request, RequestStatus
from slipring.scheduler.scheduler import Scheduler
from slipring.scheduler.step import ProtocolError, Returned, Step
from slipring.scheduler.step_cost import StepCost
from slipring.shm import wire
from slipring.shm.control import BlocksMoved, GrammarBuilt, MoveBlocks
from slipring.shm.doorbell import LoopWaiter
from slipring.shm.layout import Phase
from slipring.shm.wire import SlotKind, StepOutputView

logger = logging.getLogger(__name__)

_MIN_CHUNK = 64
_LEARNED = 8
"""Steps after which the cost of one can be predicted."""


class Listener(Protocol):
    """Whom a step loop tells. Calls come on the loop's thread."""

    def on_ready(self, loop: StepLoop, ready: wire.Ready) -> None: ...

    def on_progress(self, progress: wire.Progress) -> None: ...

    def on_fault(self, loop: StepLoop, fault: Fault) -> None: ...

    def on_delivered(self, num_tokens: int, ended: list[Request]) -> None:
        """A step's tokens have reached their completions."""
        ...


class StepLoop:
    def __init__(self, epoch: Epoch, config: ResolvedConfig, listener: Listener, cost: StepCost) -> None:
        """`cost`: what is known of steps, from epochs before too."""
        self.epoch = epoch
        self._config = config
        self._listener = listener
        self._depth = config.pipeline_depth
        self._loop = asyncio.get_running_loop()
        self.pacer = Pacer(cost)
        self._timer: asyncio.TimerHandle | None = None
        self._kick_scheduled = False
        self.fault: Fault | None = None
        self.ending = False
        """No fault is told any more: the worker was asked to end."""
        self.collector: NullCollector | IdleCollector = NullCollector()
        self.scheduler: Scheduler | None = None
        """None until the worker is ready."""
        self._undelivered: Returned | None = None
        """The oldest slot's step, between its update and its delivery. One that was delivered in part is not told
        from one that was not: `salvage` finds that it is not in flight, and what follows it is computed again."""
        self._waiter = LoopWaiter(self._loop, epoch.output_bell, epoch.outputs_are_there, self._on_outputs, SPIN_US)
        self._grammars = WorkerGrammars(epoch.control)
        self._loop.add_reader(epoch.reply_bell.fd, self._guarded, self._on_replies)
        self._deadline = StepDeadline(config.user.hang_limit_s, epoch, self._on_overdue)
        self._moved = asyncio.Event()
        """A transfer is back, or none will be any more."""

    # --- life ---------------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the worker. Raises OSError."""
        self.epoch.spawn(self._on_worker_death)
        self._deadline.starting()

    def begin(self, scheduler: Scheduler, collector: NullCollector | IdleCollector) -> None:
        """The worker is ready: schedule from now on."""
        self.scheduler = scheduler
        self.collector = collector
        self._deadline.ready()

    def stop(self) -> None:
        """Publish nothing more, and look at nothing more by itself. Idempotent."""
        if self.ending:
            return  # its descriptors may be closed by now, and their numbers somebody else's
        self.ending = True
        self._cancel_timer()
        self._deadline.cancel()
        self._waiter.close()
        self._loop.remove_reader(self.epoch.reply_bell.fd)
        self._moved.set()

    def salvage(self) -> None:
        """The worker is gone: take the steps that it had published, and deliver them; unless the requests have been
        handed over by now, and somebody else computes those steps again."""
        scheduler = self.scheduler
        if scheduler is None or scheduler.is_bereft:
            return
        try:
            while (slot := self.epoch.outputs.try_read()) is not None:
                kind, _, step_id, _ = self.epoch.outputs.header(slot)
                if kind == SlotKind.STEP:
                    view = self.epoch.output_views[slot]
                    self._deliver(scheduler, self._undelivered or scheduler.update(view, step_id), view)
                self.epoch.outputs.advance()
        except Exception as error:  # what cannot be read any more is computed again
            logger.warning("outputs of the ended epoch are dropped: %r", error)

    def requests_in_flight(self) -> list[Request]:
        """Those that the worker was computing, or was about to, and whose step never came back. None, once they have
        been handed over, or the rings are closed."""
        if self.scheduler is None or self.epoch.closed or self.scheduler.is_bereft:
            return []
        return self.scheduler.requests_in_flight()

    async def stored(self, timeout_s: float) -> None:
        """Wait, not longer than this, for the transfers that the worker has not acknowledged."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._runs and self.scheduler is not None and self.scheduler.offload.num_under_way:
                    self._moved.clear()
                    await self._moved.wait()

    def close(self) -> None:
        """Give everything back, the worker's life included. Idempotent."""
        if not self.ending:
            self.stop()
        if self.scheduler is not None:
            self.scheduler.offload.close()
        self.epoch.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request in line, once the worker has its grammar. An idle loop wakes at once; requests of one loop turn
        share a step."""
        completion: Completion | None = request.owner
        if completion is None or completion.generation.grammar is None:
            self._join_line(request)
        else:
            self._grammars.load_tokenizer(completion.detokenizer.tokenizer)
            self._grammars.require(request, completion.generation.grammar, functools.partial(self._on_grammar, request))

    def abort(self, request: Request) -> None:
        self._grammars.release(request)
        if self.scheduler is not None:
            self.scheduler.abort(request)

    def _join_line(self, request: Request) -> None:
        assert self.scheduler is not None
        self.scheduler.add(request)
        self.kick()

    def _on_grammar(self, request: Request, error: str | None) -> None:
        """The worker has the request's grammar, or cannot have it, which ends that request alone."""
        if request.status is RequestStatus.FINISHED:
            return
        if error is None:
            self._join_line(request)
        elif request.owner is not None:
            words = f"the grammar could not be built: {error}"
            request.status = RequestStatus.FINISHED
            request.owner.finish(FinishReason.ERROR, time.monotonic(), error=words)
            self._listener.on_delivered(0, [request])

    def kick(self) -> None:
        """Something may be scheduled now."""
        if not self._kick_scheduled:
            self._kick_scheduled = True
            self._loop.call_soon(self._guarded, self._kick)

    def _kick(self) -> None:
        self._kick_scheduled = False
        self._pump()

    # --- the step loop ------------------------------------------------------------------------------------------

    @property
    def _runs(self) -> bool:
        return self.fault is None and not self.ending

    def _on_outputs(self) -> None:
        """Take what has come back, at most one pipeline's worth, so that the loop gets round to everybody else."""
        for _ in range(self._depth):
            slot = self.epoch.outputs.try_read()
            if slot is None or not self._runs:
                return
            self._guarded(self._take_output, slot)
            if not self._runs:
                return  # a fault; or somebody closed us from within a sink
        if self.epoch.outputs_are_there():
            self.epoch.output_bell.ring()

    def _take_output(self, slot: int) -> None:
        """One returned step: update, publish, deliver, settle, pace. See the module's docstring for the order.

        The slot is given back as soon as all of it has been delivered: after a fault, what is left is `salvage`'s.
        """
        kind, length, step_id, _ = self.epoch.outputs.header(slot)
        scheduler = self.scheduler
        if kind != SlotKind.STEP:
            self._on_control(kind, length, slot)
            if self._runs:
                self.epoch.outputs.advance()
            return
        if scheduler is None:
            raise ProtocolError(f"step {step_id} came back, and none was sent")
        view = self.epoch.output_views[slot]
        self._undelivered = returned = scheduler.update(view, step_id)
        self._returned()
        self._pump()
        self._deliver(scheduler, returned, view)
        if not self._runs:
            return
        self.epoch.outputs.advance()
        scheduler.settle()
        self._send_transfers(scheduler)
        self._rest(scheduler)

    def _on_replies(self) -> None:
        """The worker answered on the control channel, or made room in it."""
        self.epoch.reply_bell.clear()
        for message in self.epoch.control.receive():
            if isinstance(message, GrammarBuilt):
                self._grammars.on_built(message)
            elif isinstance(message, BlocksMoved) and self.scheduler is not None:
                self._on_moved(self.scheduler, message)
            else:
                raise ProtocolError(f"a worker does not send {type(message).__name__}")

    def _on_moved(self, scheduler: Scheduler, moved: BlocksMoved) -> None:
        if moved.error is not None:
            logger.warning("a transfer of KV blocks failed, so they are recomputed: %s", moved.error)
        try:
            scheduler.offload.complete(moved.transfer_id, moved.error is None, moved.seconds)
        except KeyError:
            raise ProtocolError(f"transfer {moved.transfer_id} came back, which is not under way") from None
        self._send_transfers(scheduler)
        self._moved.set()
        self.kick()

    def _send_transfers(self, scheduler: Scheduler) -> None:
        for transfer in scheduler.take_transfers():
            is_load = transfer.kind is TransferKind.LOAD
            self.epoch.control.send(MoveBlocks(transfer.transfer_id, is_load, transfer.blocks, transfer.slots))

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds that computing so many tokens of a prompt would take; infinite while that is not known."""
        cost = self.pacer.cost
        return cost.predict(0, num_tokens, 0) if cost.num_observed >= _LEARNED else float("inf")

    def _returned(self) -> None:
        now = time.monotonic()
        self.pacer.returned(now)
        self._deadline.returned(now)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Run a part of the step loop; whatever it raises is this epoch's fault and ends it, never silently."""
        if not self._runs:
            return
        try:
            work(*arguments)
        except (ProtocolError, msgspec.DecodeError) as error:
            self._fail(Fault(Event.PROTOCOL_FAULT, f"protocol fault between engine and worker: {error}"))
        except Exception as error:
            logger.exception("the step loop raised")
            self._fail(Fault(Event.LOOP_FAULT, f"internal error in the step loop: {error!r}"))

    def _pump(self) -> None:
        """Publish as many steps as are due now; set the timer for the next one if the pipeline has room."""
        self._cancel_timer()
        scheduler = self.scheduler
        if scheduler is None:
            return
        while self._runs and scheduler.has_work and scheduler.num_in_flight < self._depth:
            if scheduler.num_in_flight:
                early_s = self.pacer.publish_at() - time.monotonic()
                if early_s > 0:
                    self._timer = self._loop.call_later(early_s, self._guarded, self._pump)
                    return
            if self._publish(scheduler) is None:
                if not scheduler.num_in_flight and not scheduler.offload.busy:
                    raise RuntimeError("there is work, nothing is in flight, and nothing can be scheduled")
                return

    def _publish(self, scheduler: Scheduler) -> Step | None:
        slot = self.epoch.steps.try_claim()
        if slot is None:
            return None  # the worker still holds every slot; its next output brings us back here
        step = scheduler.schedule(self.epoch.step_views[slot])
        self._send_transfers(scheduler)
        if step is None:
            return None  # rows or blocks must come back first, or a tier has been asked for some
        self.epoch.publish_step(step.step_id)
        self._waiter.expect()
        now = time.monotonic()
        predicted_s = self.pacer.published(step, now)
        if not self.pacer.cost.num_observed and self.epoch.ready is not None:
            # Nothing is known of steps yet but what the worker's own first one took.
            predicted_s = self.epoch.ready.phase_seconds.get("warm up", 0.0)
        self._deadline.published(predicted_s, now)
        if scheduler.admitted:
            self._note_admissions(scheduler, now)
        return step

    def _note_admissions(self, scheduler: Scheduler, now: float) -> None:
        for request in scheduler.admitted:
            if request.owner is not None and not request.owner.scheduled_at:
                request.owner.scheduled_at = now
        scheduler.admitted.clear()

    def _deliver(self, scheduler: Scheduler, returned: Returned, view: StepOutputView) -> None:
        self._undelivered = None
        ended = deliver(scheduler, returned, view, time.monotonic())
        for request in ended:
            self._grammars.release(request)
        self._listener.on_delivered(len(returned.tokens), ended)
        self._size_chunks(scheduler)

    def _size_chunks(self, scheduler: Scheduler) -> None:
        scheduler.mixed_chunk = self.pacer.cost.chunk_within(
            self._config.itl_target_s,
            scheduler.decode.num,
            self.pacer.num_context,
            least=_MIN_CHUNK,
            most=scheduler.config.max_mixed_chunk,
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _rest(self, scheduler: Scheduler) -> None:
        idle = not scheduler.num_in_flight
        self.collector.after_step(idle)
        if idle and self._config.user.debug_integrity:
            scheduler.check_integrity()

    # --- faults -------------------------------------------------------------------------------------------------

    def _on_control(self, kind: int, length: int, slot: int) -> None:
        payload = self.epoch.outputs.payload(slot)
        if kind == SlotKind.PROGRESS:
            self._listener.on_progress(wire.decode(payload, length, wire.Progress))
        elif kind == SlotKind.READY and self.epoch.ready is None:
            ready: wire.Ready = wire.decode(payload, length, wire.Ready)
            if ready.epoch != self.epoch.number:
                raise ProtocolError(f"the worker is of epoch {ready.epoch}, this is epoch {self.epoch.number}")
            self.epoch.on_ready(ready)
            self._deadline.ready()
            self._listener.on_ready(self, ready)
        elif kind == SlotKind.ERROR:
            error: wire.WorkerError = wire.decode(payload, length, wire.WorkerError)
            reason = f"the worker failed: {error.message}"
            self._fail(Fault(Event.WORKER_ERROR, reason, explained=True, traceback=error.traceback))
        else:
            raise ProtocolError(f"unknown record kind {kind}")

    def _on_worker_death(self, status: int) -> None:
        while self._runs and self.epoch.outputs_are_there():
            self._on_outputs()  # outputs that were published before the end still count, an error record above all
        worker = self.epoch.worker
        self._fail(Fault(Event.WORKER_EXIT, f"the worker (pid {worker.pid}) {worker.describe_exit(status)}"))

    def _on_overdue(self, words: str, silent_s: float, limit_s: float) -> None:
        """A deadline has passed. What lies in the ring counts before anybody is judged."""
        if self._runs and self.epoch.outputs_are_there():
            self._on_outputs()
            return
        reason = f"the worker (pid {self.epoch.worker.pid}) hangs: {words}"
        self._fail(Fault(Event.HANG, reason, silent_s=silent_s, limit_s=limit_s))

    def _fail(self, fault: Fault) -> None:
        """Nothing more is published, and whoever watches is told."""
        if not self._runs:
            return
        now, worker = time.monotonic(), self.epoch.steps.reader_state(0)
        silent_s = fault.silent_s
        if not silent_s and worker.phase is Phase.RUNNING:
            silent_s = now - worker.heartbeat_ns / 1e9
        self.fault = fault = replace(fault, silent_s=silent_s, at=now)
        self._cancel_timer()
        self._deadline.cancel()
        self._moved.set()
        self._listener.on_fault(self, fault)
