"""`Request`: one completion as the scheduler sees it, and the states it goes through.

    WAITING ──admit──▶ RUNNING ──end──▶ FINISHED
       ▲                  │
       └─preempt, restart─┘            abort: from WAITING or RUNNING to FINISHED

While a request runs, its tokens and counts live in columns indexed by its row (`scheduler.py`); `token_ids` is
brought up to date when the row ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.prefix_cache import chain_root, extend_chain
from slipring.shm.params import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class OffloadPolicy(Enum):
    """When a request's full blocks are copied to the tiers."""

    BLOCK_LEVEL = "block"
    """Each as soon as it is full."""
    REQUEST_LEVEL = "request"
    """All together, when the request ends."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What a request allows the tiers beyond the device. None: no limit; 0: not at all."""

    max_load_tokens: int | None = None
    max_store_tokens: int | None = None
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    source: str | None = None
    """The slow tier that is asked first, however slow it is: somebody has put the prompt's blocks there."""


_NO_LIMITS = TierLimits()


class Request:
    """Made at submit, where its prompt is hashed, then owned by one scheduler at a time."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "holder",
        "key",
        "leader",
        "limit",
        "num_admissions",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt",
        "num_scored",
        "num_shared_blocks",
        "owner",
        "params",
        "priority",
        "root",
        "row",
        "status",
        "stop_token_ids",
        "tier_limits",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        params: SamplingParams,
        *,
        arrival: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        leader: Request | None = None,
        owner: Any = None,
        tier_limits: TierLimits = _NO_LIMITS,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """`stop_token_ids`: more of them, that `params` does not name.

        `leader`: the first completion of the same prompt, whose blocks this one waits for and shares.

        `owner` is the caller's own; the scheduler hands it back and never looks at it.
        """
        self.token_ids = token_ids
        """int32, prompt and the outputs known when the request last waited."""
        self.num_prompt = len(token_ids)
        self.params = params
        self.limit = self.num_prompt + params.max_tokens
        """Total length at which it ends."""
        self.stop_token_ids = frozenset(params.stop_token_ids).union(stop_token_ids)
        self.priority = priority
        self.arrival = arrival
        self.key: tuple[float, int] = (0.0, 0)
        """Sorts requests by urgency, lowest first; set when the scheduler takes the request."""
        self.leader = leader
        self.num_shared_blocks: int | None = None
        """Leading blocks that it takes from its leader; None: all whole blocks of the prompt, which is the same."""
        self.owner = owner
        self.holder: object | None = None
        """Stands for the scheduler whose request it is, from `Scheduler.add` on; `restart` takes it from there."""
        self.tier_limits = tier_limits
        self.row = -1
        self.status = RequestStatus.WAITING
        self.num_cached_tokens = 0
        """Tokens taken from the prefix cache at the first admission."""
        self.num_admissions = 0
        self.num_preemptions = 0
        """Since it was last made ready for a scheduler."""
        self.num_scored = 0
        """Positions whose report has come back; the next prompt token's log-probability is known for each."""
        self.root = chain_root(cache_salt)
        self.block_hashes: list[bytes] = []
        """Hashes of the leading full blocks, as far as they have been computed."""

    def restart(self, token_ids: NDArray[np.int32], num_scored: int, block_size: int) -> None:
        """Make it ready for another scheduler, with what is known. It is the old one's no more, whose rows and blocks
        are lost."""
        self.holder = None
        self.token_ids = token_ids
        self.num_scored = num_scored
        self.status = RequestStatus.WAITING
        self.row = -1
        self.leader = self.num_shared_blocks = None
        self.num_preemptions = 0
        del self.block_hashes[len(token_ids) // block_size :]

    @property
    def num_reusable(self) -> int:
        """Leading positions that may come from the prefix cache; those behind them have something to report."""
        if self.params.prompt_logprobs < 0 or self.num_scored >= self.num_prompt - 1:
            return len(self.token_ids)
        return self.num_scored

    @property
    def draws(self) -> bool:
        """False: its prompt is computed, and that is all."""
        return self.limit > self.num_prompt

    def hash_prompt(self, block_size: int, most: int | None = None) -> bool:
        """Compute the hashes of the prompt's full blocks, at most `most` more; whether all are there now."""
        whole = self.num_prompt // block_size
        target = whole if most is None else min(whole, len(self.block_hashes) + most)
        self.extend_hashes(self.token_ids, target, block_size)
        return target == whole

    def extend_hashes(self, token_ids: NDArray[np.int32], num_full: int, block_size: int) -> None:
        """Make sure that the hashes of the first `num_full` blocks of `token_ids` are there."""
        known = len(self.block_hashes)
        if known < num_full:
            parent = self.block_hashes[-1] if known else self.root
            self.block_hashes += extend_chain(parent, token_ids[known * block_size : num_full * block_size], block_size)
