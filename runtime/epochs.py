"""`Epochs`: the lives of one replica's workers, one after the other. Owns the step loop of the one that serves, and of
the spare one, until nothing is left of them.

`Replica` says what is to happen and what follows from it; in here it is done, one change at a time (`changing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from slipring.runtime.config import ResolvedConfig
from slipring.runtime.epoch import Epoch
from slipring.runtime.fault import Fault
from slipring.runtime.flight_recorder import FlightRecorder, Record, record_of
from slipring.runtime.rendezvous import Rendezvous
from slipring.runtime.step_loop import Listener, StepLoop
from slipring.scheduler.request import Request
from slipring.scheduler.step_cost import StepCost
from slipring.shm.segment import Segment
from slipring.shm.spec import ModelSpec
from slipring.shm.weights import WeightSegment

logger = logging.getLogger(__name__)

_REAP_S = 10.0
"""A killed worker that is not gone after so long never will be (it hangs in the kernel)."""
_RETIRE_S = 2.0
_LAST_STORES_S = 0.5
"""For blocks that are on their way into the tiers when the engine stops."""


class Epochs:
    def __init__(
        self,
        config: ResolvedConfig,
        spec: ModelSpec,
        weights: WeightSegment,
        rendezvous: Rendezvous,
        tier: Segment | None,
        listener: Listener,
    ) -> None:
        """`weights`, `rendezvous` and `tier` (the CPU tier's memory) are all replicas'. Raises OSError when shared
        memory is short."""
        self.config = config
        """Of the epochs to come."""
        self._spec = spec
        self._weights = weights
        self._rendezvous = rendezvous
        self._tier = tier
        self._listener = listener
        self._cost = StepCost()
        """A new worker's steps cost what the last one's did."""
        self._recorder = FlightRecorder(config.user.flight_recorder_dir)
        self._number = 0
        self._leaving: set[StepLoop] = set()
        """Spares that are not needed any more, and whose workers are not reaped yet."""
        self._parting: StepLoop | None = None
        self._loop = asyncio.get_running_loop()
        self._work: set[asyncio.Task[None]] = set()
        self.changing = asyncio.Lock()
        """Held while one epoch is taken apart or ended, or the next one is made."""
        self.spare: StepLoop | None = None
        """An epoch that has begun before it is needed."""
        self.current = self._new_loop()

    def _new_loop(self) -> StepLoop:
        self._number += 1
        meeting = self._rendezvous.reserve()
        epoch = Epoch(self.config, self._spec, self._number, self._weights, meeting, self._tier)
        return StepLoop(epoch, self.config, self._listener, self._cost)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside everything else, and no longer than until `close`."""
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("replica %d: a change of epochs failed", self.config.rank, exc_info=error)

    # --- the end of all -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill the workers, if they still live, and give everything back. Idempotent."""
        for task in self._work:
            task.cancel()
        self.drop_spare()
        for loop in (self.current, *self._leaving):
            loop.close()

    async def shut_down(self, timeout_s: float) -> None:
        """Ask the worker to end, and wait for it, not longer than this."""
        self.drop_spare()
        await self.current.stored(_LAST_STORES_S)
        self.current.stop()
        self.current.epoch.ask_to_end()
        await asyncio.gather(*(loop.epoch.reaped(timeout_s) for loop in (self.current, *self._leaving)))

    # --- the end of one -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        """It does nothing more; what it has published can still be salvaged."""
        self.current.stop()
        self.current.epoch.worker.kill()

    async def take_apart(self, on_salvaged: Callable[[list[Request]], None]) -> bool:
        """After a fault, in `changing`: wait for the worker's end, keep what it had published, and give everything
        back. `on_salvaged` gets the requests that it was computing. False: the worker cannot be got rid of."""
        loop = self.current
        if not await loop.epoch.reaped(_REAP_S):
            return False
        if not loop.epoch.closed:  # else there was no room for a new one: nothing ran that could tell anything
            record = None if loop.fault is None else record_of(self.config.rank, loop, loop.fault)
            loop.salvage()
            in_flight = loop.requests_in_flight()
            loop.close()
            on_salvaged(in_flight)
            if loop.fault is not None:
                await self._write(loop, loop.fault, record)
        return True

    async def _write(self, loop: StepLoop, fault: Fault, record: Record | None) -> None:
        """Off the loop: nobody waits for a disk. `record` None: its rings cannot be read."""
        path = None if record is None else await asyncio.to_thread(self._recorder.write, record)
        told = f" (slipring blackbox {path})" if path is not None else ""
        logger.error("replica %d, epoch %d: %s%s", self.config.rank, loop.epoch.number, fault.reason, told)

    def part(self) -> None:
        """The current one has nothing to do any more: its worker may break now."""
        self._parting = self.current

    def is_missed(self, loop: StepLoop) -> bool:
        """It serves, or shall again: its faults count."""
        return loop is self.current and loop is not self._parting

    async def end_gently(self) -> bool:
        """In `changing`: what is on its way into the tiers arrives, the worker ends by itself, and everything is given
        back. False: the worker cannot be got rid of."""
        loop = self.current
        await loop.stored(_RETIRE_S)
        loop.stop()
        loop.epoch.ask_to_end()
        if not await loop.epoch.reaped(_RETIRE_S):
            loop.epoch.worker.kill()
            if not await loop.epoch.reaped(_REAP_S):
                return False
        loop.close()
        self._parting = None
        return True

    # --- the next one -------------------------------------------------------------------------------------------

    def begin_next(self) -> bool:
        """In `changing`, once the last one has ended. With the spare worker, where there is one, else with a new one.
        Whether it is ready. Raises OSError."""
        spare, self.spare = self.spare, None
        if spare is None:
            self.current = self._new_loop()
            self.current.spawn()
            return False
        self.current = spare
        return spare.epoch.ready is not None

    def keep_spare(self) -> None:
        """A worker that waits, model and all, for the one that serves to break."""
        if not self.config.user.warm_spare or self.spare is not None:
            return
        try:
            self.spare = self._new_loop()
            self.spare.spawn()
        except OSError as error:
            logger.warning("replica %d has no spare worker: %s", self.config.rank, error)
            self.drop_spare()

    def drop_spare(self) -> None:
        spare, self.spare = self.spare, None
        if spare is not None:
            spare.stop()
            spare.epoch.worker.kill()
            self._leaving.add(spare)
            self.run(self._let_leave(spare))

    async def _let_leave(self, spare: StepLoop) -> None:
        await spare.epoch.reaped(_REAP_S)
        self._leaving.discard(spare)
        spare.close()
