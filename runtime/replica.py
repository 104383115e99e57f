"""`Replica`: what survives its workers. Owns the requests of one data-parallel rank, and its sentinel.

A request is in the `RequestBook` from `add` to its end. Its completion knows every token that its client has been
given, so a new epoch needs nothing of the last one: `_serve` makes a new scheduler and puts every request in line with
its prompt and those tokens. They are computed again (a preemption does the same), and sampler, penalties and stop
strings go on where they were.

The sentinel (`supervisor.py`) decides, this acts: each action of its table is one method here. Whoever watches is told
of a new state before anything is done about it. Everything in here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Coroutine
from typing import Any, Protocol

from slipring.runtime.config import ResolvedConfig
from slipring.runtime.epoch import Epoch
from slipring.runtime.fault import Fault
from slipring.runtime.flight_recorder import FlightRecorder, Record, record_of
from slipring.runtime.garbage import IdleCollector, NullCollector
from slipring.runtime.metrics import Metrics
from slipring.runtime.readmission import share_prefixes
from slipring.runtime.rendezvous import Rendezvous
from slipring.runtime.request_book import RequestBook
from slipring.runtime.restarts import RestartPolicy
from slipring.runtime.step_loop import StepLoop
from slipring.runtime.supervisor import SERVING, Action, Event, Sentinel, State
from slipring.runtime.tiers.kv_tiers import KvTiers
from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.offload import Offload
from slipring.scheduler.offload.port import NullOffload, OffloadPort
from slipring.scheduler.request import Request, RequestStatus
from slipring.scheduler.scheduler import Scheduler
from slipring.scheduler.step import Counters
from slipring.scheduler.step_cost import StepCost
from slipring.shm import wire
from slipring.shm.spec import ModelSpec
from slipring.shm.weights import WeightSegment

logger = logging.getLogger(__name__)

_REAP_S = 10.0
"""A killed worker that is not gone after so long never will be (it hangs in the kernel)."""
_RETIRE_S = 2.0
_LAST_STORES_S = 0.5
"""For blocks that are on their way into the tiers when the engine stops."""


class ReplicaDeadError(Exception):
    """The replica cannot start; the message says why."""

    def __init__(self, message: str, explained: bool = False) -> None:
        """`explained`: the worker itself said why, so that its last lines add nothing."""
        super().__init__(message)
        self.explained = explained


class Watcher(Protocol):
    """Who is told what happens to a replica, before anything is done about it."""

    def on_state(self, replica: Replica) -> None: ...

    def on_progress(self, progress: wire.Progress) -> None: ...

    def on_replay(self, replica: Replica, num_requests: int) -> None:
        """So many requests go in line again, after a fault."""
        ...

    def on_stranded(self, replica: Replica, requests: list[Request]) -> list[Request]:
        """These would wait until the replica has recovered, most urgent first. Returns those that go elsewhere."""
        ...

    def on_guilty(self, replica: Replica, request: Request, reason: str) -> None:
        """This one is the replica's no more: it must end."""
        ...

    def on_homeless(self, replica: Replica, requests: list[Request], reason: str) -> None:
        """The replica gives these up: they go elsewhere, or end."""
        ...


class Replica:
    def __init__(
        self,
        config: ResolvedConfig,
        spec: ModelSpec,
        weights: WeightSegment,
        watcher: Watcher,
        rendezvous: Rendezvous,
        tiers: KvTiers | None = None,
    ) -> None:
        """`weights`, `rendezvous` and `tiers` are all replicas'. Raises OSError when shared memory is short."""
        self.rank = config.rank
        self._config = config
        self._spec = spec
        self._weights = weights
        self._watcher = watcher
        self._rendezvous = rendezvous
        self._tiers = tiers
        self._sentinel = Sentinel()
        self._loop = asyncio.get_running_loop()
        self._requests = RequestBook(config.user.block_size)
        self._counters = Counters()
        self.metrics = Metrics()
        self._restarts = RestartPolicy()
        self._cost = StepCost()
        """A new worker's steps cost what the last one's did."""
        self._recorder = FlightRecorder(config.user.flight_recorder_dir)
        self._collector: NullCollector | IdleCollector = NullCollector()
        self._started: asyncio.Future[wire.Ready] = self._loop.create_future()
        self._num_epochs = 0
        self._spare: StepLoop | None = None
        """An epoch that has begun before it is needed."""
        self._leaving: set[StepLoop] = set()
        """Spares that are not needed any more, and whose workers are not reaped yet."""
        self._parting: StepLoop | None = None
        """The step loop that has nothing to do any more. Its worker may break now."""
        self._is_closed = False
        self._is_frozen = False
        self._changed = asyncio.Event()
        """Set with each new state."""
        self._work: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        """Held while one epoch is taken apart, or the next one is made."""
        self._recovery_timer: asyncio.TimerHandle | None = None
        self.fault: Fault | None = None
        """The last one, and why the replica is not healthy."""
        self.step_loop = self._new_loop()

    # --- what others ask ----------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._sentinel.state

    @property
    def scheduler(self) -> Scheduler | None:
        """None while no worker serves."""
        return self.step_loop.scheduler if self.state in SERVING else None

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        if (scheduler := self.scheduler) is None:
            return 0, len(self._requests)
        return scheduler.num_running, len(self._requests) - scheduler.num_admitted

    @property
    def num_waiting_tokens(self) -> int:
        scheduler = self.scheduler
        if scheduler is not None:
            return scheduler.waiting.num_tokens
        return self._requests.num_tokens

    @property
    def worker_pid(self) -> int:
        return self.step_loop.epoch.worker.pid

    @property
    def last_lines(self) -> list[str]:
        """What the worker last wrote."""
        return list(self.step_loop.epoch.worker.last_lines)

    @property
    def has_spare(self) -> bool:
        """A spare worker is ready to take over."""
        return self._spare is not None and self._spare.epoch.ready is not None

    @property
    def counters(self) -> Counters:
        """They grow across epochs."""
        return self._counters

    def num_matching(self, hashes: list[bytes]) -> int:
        """How many leading blocks of a prompt are in this replica's prefix index."""
        scheduler = self.scheduler
        return 0 if scheduler is None else len(scheduler.pool.match(hashes))

    def has_room_for(self, request: Request) -> bool:
        """It would be computed at once."""
        scheduler = self.scheduler
        if scheduler is None or sum(self.load) >= self._config.user.max_num_seqs:
            return False
        num_free = scheduler.pool.num_free * self._config.user.block_size
        return num_free - scheduler.waiting.num_tokens > len(request.token_ids)

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, timeout_s: float) -> wire.Ready:
        """Spawn the first worker and wait until it is ready. Raises ReplicaDeadError, or OSError from the spawn."""
        self.step_loop.spawn()
        try:
            return await asyncio.wait_for(asyncio.shield(self._started), timeout_s)
        except TimeoutError:
            state = self.step_loop.epoch.steps.reader_state(0)
            raise ReplicaDeadError(
                f"the worker (pid {state.pid}) was not ready after {timeout_s:.0f} s; its phase is {state.phase.name}"
            ) from None

    def begin(self, config: ResolvedConfig) -> None:
        """The pool's size is known: accept requests from now on. Raises ReplicaDeadError."""
        if self.state is not State.STARTING or self._is_closed:
            raise ReplicaDeadError("the replica is closed" if self._is_closed else f"the replica is {self.state.value}")
        self._config = config
        self._on(Event.STARTED)

    def set_collector(self, collector: IdleCollector) -> None:
        self._collector = self.step_loop.collector = collector

    def close(self) -> None:
        """Kill the worker, if it still lives, and give everything back. Idempotent."""
        self._is_closed = True
        self._changed.set()
        self._cancel_recovery_timer()
        for task in self._work:
            task.cancel()
        self._drop_spare()
        for loop in (self.step_loop, *self._leaving):
            loop.close()
        if not self._started.done():
            self._started.set_exception(ReplicaDeadError("the engine was stopped while it started"))
            self._started.exception()  # nobody need be waiting for it

    async def shut_down(self, timeout_s: float) -> None:
        """Ask the worker to end, and make sure that it does."""
        if not self._is_closed:
            self._is_closed = True
            self._drop_spare()
            await self.step_loop.stored(_LAST_STORES_S)
            self.step_loop.stop()
            self.step_loop.epoch.ask_to_end()
            leaving = [self.step_loop, *self._leaving]
            await asyncio.gather(*(loop.epoch.reaped(timeout_s) for loop in leaving))
        self.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def adopt(self, requests: list[Request]) -> None:
        """Take requests that another replica had to give up."""
        share_prefixes(requests, self._config.user.block_size)
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Put a request in line; without a worker it waits for the next one."""
        self._requests.add(request)
        if self.state in SERVING:
            self.step_loop.add(request)

    def abort(self, request: Request) -> None:
        if not self._requests.remove(request):
            return
        if self.state in SERVING:
            self.step_loop.abort(request)
        request.status = RequestStatus.FINISHED
        self._release(self._requests.ended(request))
        self._tell_when_empty()

    def freeze(self, frozen: bool) -> None:
        """Schedule nothing until this is taken back."""
        self._is_frozen = frozen
        if (scheduler := self.scheduler) is not None:
            scheduler.frozen = frozen
            self.step_loop.kick()

    async def settled(self, states: Container[State]) -> State:
        """Waits until the replica is in one of these states; which one."""
        while self.state not in states and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        return self.state

    def command(self, event: Event) -> str | None:
        """Carry out a command; returns why it is refused, or None."""
        if self._on(event) is Action.REFUSE:
            return f"Rejecting {event.value} on engine {self.rank}: status is {self.state.name}"
        return None

    # --- what the step loop tells -------------------------------------------------------------------------------

    def on_ready(self, loop: StepLoop, ready: wire.Ready) -> None:
        if loop is not self.step_loop:
            return
        if not self._started.done():
            self._started.set_result(ready)
        elif self.state is State.RECOVERING:
            self._on(Event.STARTED)

    def on_progress(self, progress: wire.Progress) -> None:
        self._watcher.on_progress(progress)

    def on_fault(self, loop: StepLoop, fault: Fault) -> None:
        if loop is self._parting:
            return
        if loop is self.step_loop and not self._is_closed:
            self._on(fault.event, fault)
        elif loop is self._spare:
            logger.warning("replica %d loses its spare worker until it recovers next: %s", self.rank, fault.reason)
            self._drop_spare()

    def on_delivered(self, num_tokens: int, ended: list[Request]) -> None:
        if num_tokens:
            self._restarts.progressed()
        self._release(self._requests.delivered(ended))
        if ended:
            self._tell_when_empty()

    def _release(self, requests: list[Request]) -> None:
        """Requests that were held back go in line."""
        if self.state in SERVING:
            for request in requests:
                self.step_loop.add(request)

    def _tell_when_empty(self) -> None:
        if not self._requests and self.state in (State.DRAINING, State.REPLACING):
            self._loop.call_soon(self._on_empty)

    def _on_empty(self) -> None:
        if not self._requests and not self._is_closed:
            self._on(Event.EMPTY)

    # --- the sentinel's actions ---------------------------------------------------------------------------------

    def _on(self, event: Event, fault: Fault | None = None) -> Action:
        before = self.state
        action = self._sentinel.on(event)
        if fault is not None and self.state is not before:
            self.fault = fault
        if self.state is not before:
            self._watcher.on_state(self)
            self._changed.set()
        _ACTIONS[action](self)
        return action

    def _nothing(self) -> None:
        """IGNORE and REFUSE."""

    def _serve(self) -> None:
        """A worker is there: every request gets its place in a new scheduler."""
        self._cancel_recovery_timer()
        self._restarts.serving(time.monotonic())
        scheduler = Scheduler(
            self._config.scheduler(),
            self.step_loop.epoch.table,
            self._spec.vocab_size,
            self._make_offload,
            counters=self._counters,
        )
        scheduler.frozen = self._is_frozen
        self.step_loop.begin(scheduler, self._collector)
        self._watcher.on_replay(self, len(self._requests))
        for request in self._requests.ready():
            self.step_loop.add(request)
        self._keep_spare()

    def _make_offload(self, pool: BlockPool) -> OffloadPort:
        if self._tiers is None:
            return NullOffload(pool)
        loop, block_size = self.step_loop, self._config.user.block_size
        return Offload(self._tiers.tiers, pool, block_size, loop.kick, loop.recompute_s, stats=self._tiers.device)

    def _end_epoch(self) -> None:
        self.step_loop.stop()
        self.step_loop.epoch.worker.kill()
        if self._config.user.on_fault == "abort":
            self._hand_over()
        if self._recovery_timer is None:
            timeout_s = self._config.user.engine_recovery_timeout_sec
            self._recovery_timer = self._loop.call_later(timeout_s, self._recovery_is_late)
        self._run(self._take_apart())

    def _respawn(self) -> None:
        self._parting = self.step_loop
        self._run(self._start_epoch())

    def _respawn_fresh(self) -> None:
        self._weights.renew()
        self._drop_spare()
        self._respawn()

    def _stop_admission(self) -> None:
        """The router has been told; what is here finishes."""
        self._tell_when_empty()

    def _retire(self) -> None:
        self._drop_spare()
        self._parting = self.step_loop
        self._run(self._rest(self.step_loop))

    def _hand_over(self) -> None:
        reason = self.fault.reason if self.fault else f"the replica is {self.state.value}"
        self._watcher.on_homeless(self, self._requests.take_all(), reason)

    def _bury(self) -> None:
        if not self._started.done():
            fault = self.fault or Fault(Event.GAVE_UP, "the replica is dead")
            self._started.set_exception(ReplicaDeadError(fault.reason, fault.explained))
            self._started.exception()  # nobody need be waiting for it
        self._cancel_recovery_timer()
        self.step_loop.stop()
        self.step_loop.epoch.worker.kill()
        self._drop_spare()
        self._hand_over()

    # --- from one epoch to the next -----------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("replica %d: a change of epochs failed", self.rank, exc_info=error)

    def _new_loop(self) -> StepLoop:
        self._num_epochs += 1
        tier = None if self._tiers is None else self._tiers.segment
        meeting = self._rendezvous.reserve()
        epoch = Epoch(self._config, self._spec, self._num_epochs, self._weights, meeting, tier)
        return StepLoop(epoch, self._config, self, self._cost)

    async def _take_apart(self) -> None:
        """After a fault: wait for the worker's end, keep what it had published, and go on if nobody need be asked."""
        loop = self.step_loop
        async with self._changing:
            if not await loop.epoch.reaped(_REAP_S):
                self._on(Event.UNREAPABLE)
                return
            if not loop.epoch.closed:  # else there was no room for a new one: nothing ran that could tell anything
                record = self._look_back(loop)
                loop.salvage()
                in_flight = loop.requests_in_flight()
                self._search_guilty(in_flight)
                loop.close()
                self._offer(in_flight)
                await self._write(loop, record)
        delay_s = self._restarts.next_delay_s(time.monotonic())
        if delay_s is None:
            self._on(Event.GAVE_UP)
        elif self._config.user.auto_recovery:
            await asyncio.sleep(delay_s)
            if self.step_loop is loop:
                self._on(Event.AUTO_RECOVER)

    def _look_back(self, loop: StepLoop) -> Record | None:
        """None: it never ran (its worker could not be spawned), or its rings cannot be read."""
        return None if loop.fault is None else record_of(self.rank, loop, loop.fault)

    async def _write(self, loop: StepLoop, record: Record | None) -> None:
        """Off the loop: nobody waits for a disk."""
        if loop.fault is None:
            return
        path = None if record is None else await asyncio.to_thread(self._recorder.write, record)
        told = f" (slipring blackbox {path})" if path is not None else ""
        logger.error("replica %d, epoch %d: %s%s", self.rank, loop.epoch.number, loop.fault.reason, told)

    async def _start_epoch(self) -> None:
        """Make the next epoch, once nothing is left of the last one's worker."""
        async with self._changing:
            if await self._end_gently(self.step_loop):
                self._parting = None
                self._begin_epoch()

    async def _rest(self, loop: StepLoop) -> None:
        """There is nothing to do any more."""
        async with self._changing:
            if loop is self.step_loop and await self._end_gently(loop):
                self._parting = None

    async def _end_gently(self, loop: StepLoop) -> bool:
        """What is on its way into the tiers arrives, the worker ends by itself, and everything is given back. False:
        the worker cannot be got rid of."""
        await loop.stored(_RETIRE_S)
        loop.stop()
        loop.epoch.ask_to_end()
        if not await loop.epoch.reaped(_RETIRE_S):
            loop.epoch.worker.kill()
            if not await loop.epoch.reaped(_REAP_S):
                self._on(Event.UNREAPABLE)
                return False
        loop.close()
        return True

    def _begin_epoch(self) -> None:
        """With the spare worker's, where there is one, else with a new worker's, which must start first."""
        spare, self._spare = self._spare, None
        if spare is not None:
            self.step_loop = spare
            if spare.epoch.ready is not None:
                self._on(Event.STARTED)
            return
        try:
            self.step_loop = self._new_loop()
            self.step_loop.spawn()
        except OSError as error:
            self._on(Event.WORKER_EXIT, Fault(Event.WORKER_EXIT, f"there is no room for a new worker: {error}"))

    def _keep_spare(self) -> None:
        """A worker that waits, model and all, for the one that serves to break."""
        if not self._config.user.warm_spare or self._spare is not None:
            return
        try:
            self._spare = self._new_loop()
            self._spare.spawn()
        except OSError as error:
            logger.warning("replica %d has no spare worker: %s", self.rank, error)
            self._drop_spare()

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.stop()
            spare.epoch.worker.kill()
            self._leaving.add(spare)
            self._run(self._let_leave(spare))

    async def _let_leave(self, spare: StepLoop) -> None:
        await spare.epoch.reaped(_REAP_S)
        self._leaving.discard(spare)
        spare.close()

    def _search_guilty(self, in_flight: list[Request]) -> None:
        """The worker died under these."""
        learned, guilty = self._requests.died(in_flight)
        if learned:
            self._restarts.learned(guilty is not None)
        if guilty is not None:
            assert self.fault is not None
            reason = f"this request ends every worker that computes it, so it is given up: {self.fault.reason}"
            self._watcher.on_guilty(self, guilty, reason)

    def _offer(self, in_flight: list[Request]) -> None:
        """Requests that need not wait for the next epoch go on elsewhere, where there is room."""
        if leaving := self._requests.leaving(in_flight):
            self._requests.left(self._watcher.on_stranded(self, leaving), in_flight)

    def _recovery_is_late(self) -> None:
        self._recovery_timer = None
        self._on(Event.RECOVERY_TIMEOUT)

    def _cancel_recovery_timer(self) -> None:
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
            self._recovery_timer = None


_ACTIONS: dict[Action, Callable[[Replica], None]] = {
    Action.IGNORE: Replica._nothing,
    Action.REFUSE: Replica._nothing,
    Action.SERVE: Replica._serve,
    Action.END_EPOCH: Replica._end_epoch,
    Action.RESPAWN: Replica._respawn,
    Action.RESPAWN_FRESH: Replica._respawn_fresh,
    Action.STOP_ADMISSION: Replica._stop_admission,
    Action.RETIRE: Replica._retire,
    Action.HAND_OVER: Replica._hand_over,
    Action.BURY: Replica._bury,
}
