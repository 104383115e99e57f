"""`Replica`: what survives its workers. Owns the requests of one data-parallel rank, and its sentinel.

A request is in the `RequestBook` from `add` to its end. Its completion knows every token that its client has been
given, so a new epoch needs nothing of the last one: `_serve` makes a new scheduler and puts every request in line with
its prompt and those tokens. They are computed again (a preemption does the same), and sampler, penalties and stop
strings go on where they were.

The sentinel (`supervisor.py`) decides, this acts: each action of its table is one method here. Whoever watches is told
of a new state before anything is done about it. Workers are begun and ended by `epochs.py`. Everything in here runs on
the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container
from typing import Protocol

from slipring.runtime.config import ResolvedConfig
from slipring.runtime.epochs import Epochs
from slipring.runtime.fault import Fault
from slipring.runtime.garbage import IdleCollector, NullCollector
from slipring.runtime.metrics import Metrics
from slipring.runtime.readmission import share_prefixes
from slipring.runtime.rendezvous import Rendezvous
from slipring.runtime.request_book import DIED_TWICE, RequestBook, died_elsewhere
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
from slipring.shm import wire
from slipring.shm.spec import ModelSpec
from slipring.shm.weights import WeightSegment

logger = logging.getLogger(__name__)


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

    def on_homeless(self, replica: Replica, requests: list[Request], spent: list[Request], reason: str) -> None:
        """The replica gives these up: they go elsewhere, or end. `spent` must end: see `RequestBook.take_all`."""
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
        self._vocab_size = spec.vocab_size
        self._weights = weights
        self._watcher = watcher
        self._tiers = tiers
        self._sentinel = Sentinel()
        self._loop = asyncio.get_running_loop()
        self._requests = RequestBook(config.user.block_size)
        self._counters = Counters()
        self.metrics = Metrics()
        self._restarts = RestartPolicy()
        self._collector: NullCollector | IdleCollector = NullCollector()
        self._started: asyncio.Future[wire.Ready] = self._loop.create_future()
        self._is_closed = False
        self._is_frozen = False
        self._changed = asyncio.Event()
        """Set with each new state."""
        self._recovery_timer: asyncio.TimerHandle | None = None
        self.fault: Fault | None = None
        """The last one, and why the replica is not healthy."""
        tier = None if tiers is None else tiers.segment
        self.epochs = Epochs(config, spec, weights, rendezvous, tier, self)

    # --- what others ask ----------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._sentinel.state

    @property
    def step_loop(self) -> StepLoop:
        return self.epochs.current

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
        return self.epochs.spare is not None and self.epochs.spare.epoch.ready is not None

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
        self._config = self.epochs.config = config
        self._on(Event.STARTED)

    def set_collector(self, collector: IdleCollector) -> None:
        self._collector = self.step_loop.collector = collector

    def close(self) -> None:
        """Kill the worker, if it still lives, and give everything back. Idempotent."""
        self._is_closed = True
        self._changed.set()
        self._cancel_recovery_timer()
        self.epochs.close()
        if not self._started.done():
            self._started.set_exception(ReplicaDeadError("the engine was stopped while it started"))
            self._started.exception()  # nobody need be waiting for it

    async def shut_down(self, timeout_s: float) -> None:
        """Ask the worker to end, and make sure that it does."""
        if not self._is_closed:
            self._is_closed = True
            await self.epochs.shut_down(timeout_s)
        self.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def adopt(self, requests: list[Request]) -> None:
        """Take requests that another replica had to give up."""
        share_prefixes(requests, self._config.user.block_size)
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Put a request in line, unless it must wait for its trial; without a worker it waits for the next one."""
        if self._requests.add(request) and self.state in SERVING:
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
        if self.epochs.is_missed(loop) and not self._is_closed:
            self._on(fault.event, fault)
        elif loop is self.epochs.spare:
            logger.warning("replica %d loses its spare worker until it recovers next: %s", self.rank, fault.reason)
            self.epochs.drop_spare()

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
            self._vocab_size,
            self._make_offload,
            counters=self._counters,
        )
        scheduler.frozen = self._is_frozen
        self.step_loop.begin(scheduler, self._collector)
        self._watcher.on_replay(self, len(self._requests))
        for request in self._requests.ready():
            self.step_loop.add(request)
        self.epochs.keep_spare()

    def _make_offload(self, pool: BlockPool) -> OffloadPort:
        if self._tiers is None:
            return NullOffload(pool)
        loop, block_size = self.step_loop, self._config.user.block_size
        return Offload(self._tiers.tiers, pool, block_size, loop.kick, loop.recompute_s, stats=self._tiers.device)

    def _end_epoch(self) -> None:
        self.epochs.kill()
        if self._config.user.on_fault == "abort":
            self._hand_over()
        if self._recovery_timer is None:
            timeout_s = self._config.user.engine_recovery_timeout_sec
            self._recovery_timer = self._loop.call_later(timeout_s, self._recovery_is_late)
        self.epochs.run(self._take_apart())

    def _respawn(self) -> None:
        self.epochs.part()
        self.epochs.run(self._start_epoch())

    def _respawn_fresh(self) -> None:
        self._weights.renew()
        self.epochs.drop_spare()
        self._respawn()

    def _stop_admission(self) -> None:
        """The router has been told; what is here finishes."""
        self._tell_when_empty()

    def _retire(self) -> None:
        self.epochs.drop_spare()
        self.epochs.part()
        self.epochs.run(self._rest(self.step_loop))

    def _hand_over(self) -> None:
        reason = self.fault.reason if self.fault else f"the replica is {self.state.value}"
        going, spent = self._requests.take_all(self.step_loop.requests_in_flight())
        self._watcher.on_homeless(self, going, spent, reason)

    def _bury(self) -> None:
        if not self._started.done():
            fault = self.fault or Fault(Event.GAVE_UP, "the replica is dead")
            self._started.set_exception(ReplicaDeadError(fault.reason, fault.explained))
            self._started.exception()  # nobody need be waiting for it
        self._cancel_recovery_timer()
        self.epochs.kill()
        self.epochs.drop_spare()
        self._hand_over()

    # --- from one epoch to the next -----------------------------------------------------------------------------

    async def _take_apart(self) -> None:
        """After a fault: wait for the worker's end, keep what it had published, and go on if nobody need be asked."""
        loop = self.step_loop
        async with self.epochs.changing:
            if not await self.epochs.take_apart(self._on_salvaged):
                self._on(Event.UNREAPABLE)
                return
        delay_s = self._restarts.next_delay_s(time.monotonic())
        if delay_s is None:
            self._on(Event.GAVE_UP)
        elif self._config.user.auto_recovery:
            await asyncio.sleep(delay_s)
            if self.step_loop is loop:
                self._on(Event.AUTO_RECOVER)

    async def _start_epoch(self) -> None:
        """Make the next epoch, once nothing is left of the last one's worker."""
        async with self.epochs.changing:
            if not await self.epochs.end_gently():
                self._on(Event.UNREAPABLE)
            elif self.state is State.RECOVERING and not self._is_closed:  # else it was given up in the meantime
                try:
                    is_ready = self.epochs.begin_next()
                except OSError as error:
                    reason = f"there is no room for a new worker: {error}"
                    self._on(Event.WORKER_EXIT, Fault(Event.WORKER_EXIT, reason))
                else:
                    if is_ready:
                        self._on(Event.STARTED)

    async def _rest(self, loop: StepLoop) -> None:
        """There is nothing to do any more."""
        async with self.epochs.changing:
            if loop is self.step_loop and not await self.epochs.end_gently():
                self._on(Event.UNREAPABLE)

    def _on_salvaged(self, in_flight: list[Request]) -> None:
        """Whoever waits for the next epoch, and whoever does not."""
        self._search_guilty(in_flight)
        self._offer(in_flight)

    def _search_guilty(self, in_flight: list[Request]) -> None:
        """The worker died under these."""
        learned, guilty = self._requests.died(in_flight)
        if learned:
            self._restarts.learned(guilty is not None)
        if guilty is not None:
            assert self.fault is not None
            why = "this request ends every worker that computes it"
            if died_elsewhere(guilty):
                why = DIED_TWICE
            reason = f"{why}, so it is given up: {self.fault.reason}"
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
