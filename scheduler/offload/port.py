"""`OffloadPort`: what the scheduler knows of tiers, and `NullOffload`, its twin for engines without any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.offload.transfers import Transfer
from slipring.scheduler.request import Request

Int32Array = NDArray[np.int32]


class OffloadPort(Protocol):
    """What the scheduler knows of tiers."""

    @property
    def num_under_way(self) -> int:
        """Transfers that the worker has not acknowledged."""
        ...

    @property
    def busy(self) -> bool:
        """Something is under way that will wake the scheduler up."""
        ...

    def begin(self, request: Request) -> None:
        """It has got in line, with its prompt hashed: what slow tiers hold of it may be brought up meanwhile."""
        ...

    def holds_back(self, request: Request, num_free: int, last_step: int) -> bool:
        """It is at the head of the line, and `num_free` blocks could be its own: must it still wait for a load?

        `last_step` is the last step that was sent out.
        """
        ...

    def admitted(self, request: Request, num_found: int) -> int:
        """It holds its blocks itself now, of which the first `num_found` were in the pool. Returns how many of these
        had been loaded for it; they count as hit the first time, and later ones as none."""
        ...

    def forget(self, request: Request) -> None:
        """It has left the line unadmitted."""
        ...

    def offer(self, request: Request, first: int, blocks: Sequence[int]) -> None:
        """Its blocks from number `first` on are full, returned and in the prefix index: keep copies."""
        ...

    def ended(self, request: Request, blocks: Sequence[int]) -> None:
        """Its row ends, and these were its full blocks, which it holds still."""
        ...

    def give_way(self) -> bool:
        """Somebody needs blocks: let go of what waits to be admitted. Whether anything was let go of."""
        ...

    def take_transfers(self, oldest_step: int) -> list[Transfer]:
        """What the worker must be told now, in order; every step before `oldest_step` is back."""
        ...

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        """The worker has acknowledged it, and says what it took. Raises KeyError for one that is not under way."""
        ...

    def close(self) -> None:
        """The worker is gone with all its blocks: nothing of ours is under way any more. Idempotent."""
        ...

    def held_blocks(self) -> list[Int32Array]:
        """For the pool's integrity check: every reference of ours."""
        ...


class NullOffload:
    """No tiers."""

    busy = False
    num_under_way = 0

    def __init__(self, pool: BlockPool) -> None: ...

    def begin(self, request: Request) -> None: ...

    def holds_back(self, request: Request, num_free: int, last_step: int) -> bool:
        return False

    def admitted(self, request: Request, num_found: int) -> int:
        return 0

    def forget(self, request: Request) -> None: ...

    def offer(self, request: Request, first: int, blocks: Sequence[int]) -> None: ...

    def ended(self, request: Request, blocks: Sequence[int]) -> None: ...

    def give_way(self) -> bool:
        return False

    def take_transfers(self, oldest_step: int) -> list[Transfer]:
        return []

    def complete(self, transfer_id: int, success: bool, seconds: float) -> None:
        raise KeyError(transfer_id)

    def close(self) -> None: ...

    def held_blocks(self) -> list[Int32Array]:
        return []
