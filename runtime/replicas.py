"""`Replicas`: all replicas of an engine on its one loop. Starts them, finds a place for each request, sums them up.

While a replica recovers, its requests go on with others that have room for them; the rest waits for it. When it gives
requests up (it is dead or was removed) all move; where there is nobody, or the engine was told to abort, they end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

from slipring.runtime.config import ResolvedConfig
from slipring.runtime.rendezvous import Rendezvous
from slipring.runtime.replica import Replica
from slipring.runtime.request_book import DIED_TWICE
from slipring.runtime.router import Candidate, Router
from slipring.runtime.supervisor import SERVING, State
from slipring.runtime.tiers.kv_tiers import KvTiers
from slipring.scheduler.request import Request
from slipring.shm import wire
from slipring.shm.spec import ModelSpec
from slipring.shm.weights import WeightSegment

logger = logging.getLogger(__name__)

_OVER = (State.DEAD, State.REMOVED)
_COMING_BACK = (State.UNHEALTHY, State.RECOVERING)


class Unavailable(Exception):
    """No replica can take the request; the message says why."""


class Replicas:
    def __init__(
        self,
        config: ResolvedConfig,
        spec: ModelSpec,
        on_state: Callable[[Replica], None],
        on_progress: Callable[[wire.Progress], None],
        fail: Callable[[list[Request], str], None],
        tiers: KvTiers | None = None,
    ) -> None:
        """Raises OSError when shared memory is short; then nothing is left of it."""
        self._config = config
        self._tell_state = on_state
        self._tell_progress = on_progress
        self._fail = fail
        self._router = Router(slack=max(8, config.user.max_num_seqs // 4))
        self._weights = WeightSegment()
        self.rendezvous = Rendezvous()
        self._all: list[Replica] = []
        self._healthy_since = [0.0] * config.user.data_parallel_size
        try:
            for rank in range(config.user.data_parallel_size):
                self._all.append(Replica(config.for_rank(rank), spec, self._weights, self, self.rendezvous, tiers))
        except OSError:
            self.close()
            raise

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, rank: int) -> Replica:
        return self._all[rank]

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, timeout_s: float) -> list[wire.Ready]:
        """Spawn every worker; returns when all are ready. Raises ReplicaDeadError for the first that is not."""
        starting: list[asyncio.Future[wire.Ready]] = []
        try:
            for replica in self._all:
                starting.append(asyncio.ensure_future(replica.start(timeout_s)))
                await asyncio.sleep(0)  # to spawn one holds up the loop: signals and probes come between
            return await asyncio.gather(*starting)
        finally:
            for start in starting:
                start.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    def begin(self, config: ResolvedConfig) -> None:
        """Accept requests. Raises ReplicaDeadError when one has died in the meantime."""
        for replica in self._all:
            replica.begin(config.for_rank(replica.rank))

    async def shut_down(self, timeout_s: float) -> None:
        await asyncio.gather(*(replica.shut_down(timeout_s) for replica in self._all))
        self._weights.close()
        self.rendezvous.close()

    def close(self) -> None:
        for replica in self._all:
            replica.step_loop.epoch.worker.kill()  # all at once: each is waited for as it is closed
        for replica in self._all:
            replica.close()
        self._weights.close()
        self.rendezvous.close()

    @property
    def last_lines(self) -> list[str]:
        """What the worker of the first replica that is not well has written last."""
        worst = next((replica for replica in self._all if replica.state is not State.HEALTHY), self._all[0])
        return list(worst.last_lines)

    # --- requests -----------------------------------------------------------------------------------------------

    def choose(self, hashes: list[bytes], pinned: int | None, session: str | None) -> Replica:
        """The replica that takes a request. Ask once for each: the answer is remembered. Raises Unavailable."""
        return self._prefer(self.open_to(pinned), hashes, session)

    def open_to(self, pinned: int | None) -> list[Replica]:
        """Those that may take a request, at least one. Raises Unavailable."""
        open_to = [replica for replica in self._all if replica.state is State.HEALTHY]
        if not open_to and self._config.user.on_fault == "replay" and self._config.user.auto_recovery:
            open_to = [replica for replica in self._all if replica.state in _COMING_BACK]
        if pinned is not None:
            open_to = [replica for replica in open_to if replica.rank == pinned]
            if not open_to:
                state = self._all[pinned].state.value
                raise Unavailable(f"data-parallel rank {pinned} takes no requests now: it is {state}")
        if not open_to:
            raise Unavailable(self.reason or "no replica takes requests now")
        return open_to

    def _prefer(self, open_to: list[Replica], hashes: list[bytes], session: str | None) -> Replica:
        if len(open_to) == 1:
            return open_to[0]
        candidates = [Candidate(each.rank, *each.load, each.num_matching(hashes)) for each in open_to]
        return self._all[self._router.choose(candidates, session)]

    def freeze(self, frozen: bool) -> None:
        """Whether running requests stop where they are."""
        for replica in self._all:
            replica.freeze(frozen)

    def forget_prefixes(self) -> None:
        """Forget what free blocks hold. Live requests keep theirs."""
        for replica in self._all:
            if replica.scheduler is not None:
                replica.scheduler.pool.forget_all()

    # --- what they are ------------------------------------------------------------------------------------------

    @property
    def any_healthy(self) -> bool:
        return any(replica.state in SERVING for replica in self._all)

    def num_in_state(self) -> dict[str, int]:
        """Replicas by state."""
        counts = dict.fromkeys((state.value for state in State), 0)
        for replica in self._all:
            counts[replica.state.value] += 1
        return counts

    @property
    def all_over(self) -> bool:
        return all(replica.state in _OVER for replica in self._all)

    @property
    def reason(self) -> str | None:
        """Why it is as bad as it is."""
        return next((replica.fault.reason for replica in self._all if replica.fault is not None), None)

    # --- what a replica tells (Watcher) -------------------------------------------------------------------------

    def on_state(self, replica: Replica) -> None:
        self._count(replica)
        self._tell_state(replica)

    def _count(self, replica: Replica) -> None:
        fault, counts = replica.fault, replica.metrics.faults
        if fault is None:
            return
        if replica.state is State.UNHEALTHY:
            counts.by_event[fault.event.value] = counts.by_event.get(fault.event.value, 0) + 1
            if fault.silent_s:
                counts.detection_s.observe(fault.silent_s)
        elif replica.state is State.HEALTHY and fault.at > self._healthy_since[replica.rank]:
            self._healthy_since[replica.rank] = now = time.monotonic()
            counts.recovery_s.observe(now - fault.at)

    def on_replay(self, replica: Replica, num_requests: int) -> None:
        replica.metrics.faults.num_replayed += num_requests

    def on_progress(self, progress: wire.Progress) -> None:
        self._tell_progress(progress)

    def on_guilty(self, replica: Replica, request: Request, reason: str) -> None:
        logger.error("replica %d: %s", replica.rank, reason)
        replica.metrics.faults.num_guilty += 1
        self._fail([request], reason)

    def on_stranded(self, replica: Replica, requests: list[Request]) -> list[Request]:
        if self._config.user.on_fault == "abort":
            return []
        moved = [request for request in requests if self._move(request, self._others(replica))]
        if moved:
            replica.metrics.faults.num_replayed += len(moved)
            logger.warning("replica %d recovers; %d of its requests go on elsewhere", replica.rank, len(moved))
        return moved

    def _move(self, request: Request, others: list[Replica]) -> bool:
        """Where it is computed at once, and by preference where most of it is known."""
        if not (free := [other for other in others if other.has_room_for(request)]):
            return False
        target = self._prefer(free, request.block_hashes, request.owner.generation.session)
        request.owner.place(target)
        leader = request.leader
        if leader is not None and (leader.owner is None or leader.owner.replica is not target):
            request.leader = request.num_shared_blocks = None  # a row of another replica's would be waited for
        target.add(request)
        return True

    def _others(self, replica: Replica) -> list[Replica]:
        return [other for other in self._all if other is not replica and other.state is State.HEALTHY]

    def on_homeless(self, replica: Replica, requests: list[Request], spent: list[Request], reason: str) -> None:
        if spent:
            words = f"{DIED_TWICE}, so it is given up"
            logger.error("replica %d: %d requests of which this is true: %s", replica.rank, len(spent), words)
            self._fail(spent, f"{words}: {reason}")
        elsewhere = self._others(replica)
        if not elsewhere or (self._config.user.on_fault == "abort" and replica.state is not State.DRAINED):
            self._fail(requests, reason)
            return
        least = min(elsewhere, key=lambda other: sum(other.load))
        logger.warning("replica %d gives up %d requests; replica %d goes on", replica.rank, len(requests), least.rank)
        for request in requests:
            request.owner.place(least)
        least.adopt(requests)
