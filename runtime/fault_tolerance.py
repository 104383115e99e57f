"""The commands of the fault-tolerance protocol, as an operator or a tool sends them, and what they came to.

    retry            a new epoch for every unhealthy replica, with what survived
    restart_workers  the same, but nothing of the last epoch is trusted: weights are read again
    scale_down       `removed_dp_ranks` never come back; their requests go to the others
    drain            `dp_ranks` finish their requests and rest (also when healthy)
    replace          `dp_ranks`, one after the other: drained, then a new worker (also when healthy)

Instructions, shapes and texts are vLLM's where it has them. `dp_ranks` may be given to all but scale_down; without it
retry and restart_workers are for every replica that is not well, and drain and replace for every replica. A command
that its replica's state does not allow is refused with the reason, and changes nothing.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from slipring.runtime.replica import Replica
from slipring.runtime.replicas import Replicas
from slipring.runtime.supervisor import SERVING, Event, State

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 1024
_OVER = (State.HEALTHY, State.DRAINED, State.DEAD, State.REMOVED)
"""States in which a replica waits for nothing."""


class FaultToleranceRequest(msgspec.Struct, frozen=True):
    instruction: str
    params: dict[str, Any] = {}
    request_id: str = ""


class FaultToleranceResult(msgspec.Struct, frozen=True):
    request_id: str
    success: bool
    reason: str | None = None


class CommandRefused(Exception):
    """The message says why."""


class BadCommand(CommandRefused):
    """Whatever state the replicas are in, the command names something that there is not; `param` is where."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class FaultTolerance:
    """Carries commands out on the replicas of one engine."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._results: OrderedDict[str, FaultToleranceResult | None] = OrderedDict()
        """By request id; None while it is being carried out. A command that comes twice is carried out once."""
        self._last_of_rank: dict[int, FaultToleranceRequest] = {}

    def check(self, request: FaultToleranceRequest) -> None:
        """What can be said before anything is done, whatever the replicas are up to. Raises BadCommand."""
        name = "removed_dp_ranks" if request.instruction == "scale_down" else "dp_ranks"
        if name in request.params or request.instruction == "scale_down":
            self._by_ranks(request.params.get(name), name)

    async def apply(self, request: FaultToleranceRequest) -> FaultToleranceResult | None:
        """Carry it out, and wait for what becomes of it. None: a request of this id is under way."""
        if request.request_id in self._results:
            return self._results[request.request_id]
        self._remember(request.request_id, None)
        try:
            await _INSTRUCTIONS[request.instruction](self, request)
            result = FaultToleranceResult(request.request_id, True)
        except CommandRefused as refusal:
            result = FaultToleranceResult(request.request_id, False, str(refusal))
            logger.warning("[FT] %s", refusal)
        self._remember(request.request_id, result)
        return result

    def status(self) -> dict[str, dict[str, Any]]:
        """By rank, in vLLM's shape and a little more. Asks nobody, so it answers whatever hangs."""
        return {str(replica.rank): self._status_of(replica) for replica in self._replicas}

    def _status_of(self, replica: Replica) -> dict[str, Any]:
        found: dict[str, Any] = {"id": replica.rank, "status": replica.state.status, "state": replica.state.value}
        if replica.state not in SERVING and replica.fault is not None:
            found |= {"fault_info": replica.fault.event.name, "reason": replica.fault.reason}
        if (command := self._last_of_rank.get(replica.rank)) is not None:
            result = self._results.get(command.request_id)
            found["last_command"] = {
                "request_id": command.request_id,
                "instruction": command.instruction,
                "success": None if result is None else result.success,
                "reason": None if result is None else result.reason,
            }
        return found

    def _remember(self, request_id: str, result: FaultToleranceResult | None) -> None:
        self._results[request_id] = result
        if len(self._results) > _MOST_REMEMBERED:
            self._results.popitem(last=False)

    # --- instructions -------------------------------------------------------------------------------------------

    async def _retry(self, request: FaultToleranceRequest) -> None:
        await self._restart(request, Event.RETRY)

    async def _restart_workers(self, request: FaultToleranceRequest) -> None:
        await self._restart(request, Event.RESTART_WORKERS)

    async def _restart(self, request: FaultToleranceRequest, event: Event) -> None:
        targets = self._targets(request)
        refusals = [refusal for replica in targets if (refusal := replica.command(event)) is not None]
        if len(refusals) == len(targets) or ("dp_ranks" in request.params and refusals):
            raise CommandRefused("; ".join(refusals))
        for replica in targets:
            await self._outcome(replica, request.instruction)

    async def _drain(self, request: FaultToleranceRequest) -> None:
        targets = self._targets(request)
        for replica in targets:
            _must(replica.command(Event.DRAIN))
        for replica in targets:
            if await replica.settled(_OVER) is not State.DRAINED:
                raise CommandRefused(f"[engine {replica.rank}] a fault or another command came between")

    async def _replace(self, request: FaultToleranceRequest) -> None:
        for replica in self._targets(request):
            _must(replica.command(Event.REPLACE))
            await self._outcome(replica, request.instruction)

    async def _scale_down(self, request: FaultToleranceRequest) -> None:
        removed = self._check_removal(request.params)
        self._note(request, removed)
        if any(replica.rank == 0 for replica in removed):
            self._move_rendezvous(request.params)
        for replica in removed:
            _must(replica.command(Event.SCALE_DOWN))

    async def _outcome(self, replica: Replica, instruction: str) -> None:
        if await replica.settled(_OVER) is not State.HEALTHY:
            raise CommandRefused(f"{instruction} on engine {replica.rank} failed: status is {replica.state.name}")

    # --- whom they are for --------------------------------------------------------------------------------------

    def _targets(self, request: FaultToleranceRequest) -> list[Replica]:
        ranks = request.params.get("dp_ranks", list(range(len(self._replicas))))
        targets = self._by_ranks(ranks, "dp_ranks")
        if "dp_ranks" not in request.params:
            targets = [replica for replica in targets if replica.state is not State.REMOVED]
        self._note(request, targets)
        return targets

    def _note(self, request: FaultToleranceRequest, targets: Sequence[Replica]) -> None:
        for replica in targets:
            self._last_of_rank[replica.rank] = request

    def _by_ranks(self, ranks: Any, name: str) -> list[Replica]:
        """Raises BadCommand unless these are ranks."""
        if not isinstance(ranks, list) or not ranks or not all(type(rank) is int for rank in ranks):
            raise BadCommand(f"`{name}` must be a list of one or more ranks", f"params.{name}")
        most = len(self._replicas) - 1
        if outside := [rank for rank in ranks if not 0 <= rank <= most]:
            known = "there is rank 0 alone" if most == 0 else f"there are 0 to {most}"
            raise BadCommand(f"`{name}` holds {outside}, which are no ranks: {known}", f"params.{name}")
        return [self._replicas[rank] for rank in dict.fromkeys(ranks)]

    def _check_removal(self, params: dict[str, Any]) -> list[Replica]:
        """Raises CommandRefused, and then nothing has changed, so that a failed round can be repeated."""
        named = self._by_ranks(params.get("removed_dp_ranks"), "removed_dp_ranks")
        removed = [replica for replica in named if replica.state is not State.REMOVED]
        if not removed:
            raise CommandRefused("`removed_dp_ranks` holds no rank that was not removed already")
        if all(replica in removed or replica.state is State.REMOVED for replica in self._replicas):
            raise CommandRefused("`removed_dp_ranks` would leave no rank")
        for replica in removed:
            if replica.state not in (State.UNHEALTHY, State.DRAINED, State.DEAD):
                raise CommandRefused(f"Rejecting scale_down on engine {replica.rank}: status is {replica.state.name}")
        return removed

    def _move_rendezvous(self, params: dict[str, Any]) -> None:
        """Groups that span workers meet at rank 0's address, and survivors must be told where from now on. Raises
        CommandRefused, and then nothing has changed."""
        host, port = _address(params)
        try:
            self._replicas.rendezvous.move(host, port)
        except OSError as error:
            words = f"`dp_master_ip` {host} and `dp_store_port` {port}: no worker of this node can be met there"
            raise CommandRefused(f"{words} ({error.strerror or error})") from None


def _must(refusal: str | None) -> None:
    if refusal is not None:
        raise CommandRefused(refusal)


def _address(params: dict[str, Any]) -> tuple[str, int]:
    """Raises CommandRefused."""
    port, host = params.get("dp_store_port"), params.get("dp_master_ip")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise CommandRefused("rank 0 is removed: `dp_store_port` must name the port of the new store")
    try:
        ipaddress.ip_address(host or "")
    except ValueError:
        raise CommandRefused("rank 0 is removed: `dp_master_ip` must name the address of the new store") from None
    return str(host), port


_INSTRUCTIONS: dict[str, Callable[[FaultTolerance, FaultToleranceRequest], Awaitable[None]]] = {
    "retry": FaultTolerance._retry,
    "restart_workers": FaultTolerance._restart_workers,
    "scale_down": FaultTolerance._scale_down,
    "drain": FaultTolerance._drain,
    "replace": FaultTolerance._replace,
}
INSTRUCTIONS = tuple(_INSTRUCTIONS)
