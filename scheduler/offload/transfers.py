"""`Outbox`: transfers between the device's blocks and slots, from the decision to the worker's acknowledgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from slipring.scheduler.offload.key import OffloadKey

_JOB_BLOCKS = 32
"""Blocks of one transfer: what the device, or a CPU's thread, moves in a few milliseconds."""


class TransferKind(IntEnum):
    STORE = 1
    """From the device's blocks into slots."""
    LOAD = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the worker is told: blocks[i] and slots[i] belong together."""

    transfer_id: int
    kind: TransferKind
    blocks: list[int]
    slots: list[int]
    keys: list[OffloadKey]
    """The scheduler's own business, as what follows."""
    done: Done
    after_step: int
    """The step that must be back before the worker is told."""


Done = Callable[[Transfer, bool, float], None]
"""done(transfer, whether all of it was moved, seconds that it took)."""


@dataclass(slots=True)
class OffloadStats:
    """Of an engine, all replicas and epochs together; these only grow."""

    loaded_blocks: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    store_seconds: float = 0.0
    load_failures: int = 0
    stores_skipped: int = 0


class Outbox:
    def __init__(self) -> None:
        self._under_way: dict[int, Transfer] = {}
        self._waiting: list[Transfer] = []
        self._next_id = 0

    def __len__(self) -> int:
        """Transfers that the worker has not acknowledged, or not even been told."""
        return len(self._under_way)

    @property
    def under_way(self) -> Iterable[Transfer]:
        return self._under_way.values()

    def send(
        self,
        kind: TransferKind,
        blocks: Sequence[int],
        slots: Sequence[int],
        keys: Sequence[OffloadKey],
        done: Done,
        after_step: int = -1,
    ) -> int:
        """In as many transfers as it takes; returns how many. `done` is called for each."""
        parts = [slice(at, at + _JOB_BLOCKS) for at in range(0, len(blocks), _JOB_BLOCKS)]
        for part in parts:
            moved = list(blocks[part]), list(slots[part]), list(keys[part])
            transfer = Transfer(self._next_id, kind, *moved, done, after_step)
            self._next_id += 1
            self._under_way[transfer.transfer_id] = transfer
            self._waiting.append(transfer)
        return len(parts)

    def take(self, oldest_step: int) -> list[Transfer]:
        """What the worker must be told now, in order; every step before `oldest_step` is back."""
        due = [transfer for transfer in self._waiting if transfer.after_step < oldest_step]
        if due:
            self._waiting = [transfer for transfer in self._waiting if transfer.after_step >= oldest_step]
        return due

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        """Raises KeyError for one that is not under way."""
        transfer = self._under_way.pop(transfer_id)
        transfer.done(transfer, success, seconds)

    def clear(self) -> None:
        """Nobody is called back for what was under way."""
        self._under_way.clear()
        self._waiting.clear()
