"""Requests whose epoch has ended, made ready for another: what is known of them, and who computes what they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.request import Request


def known_tokens(request: Request) -> NDArray[np.int32]:
    """The prompt and the tokens that its client has been given, whatever a scheduler may have known besides."""
    prompt = request.token_ids[: request.num_prompt]
    outputs = request.owner.token_ids if request.owner is not None else ()
    return np.concatenate([prompt, np.asarray(outputs, np.int32)]) if len(outputs) else prompt


def num_scored(request: Request) -> int:
    """Prompt positions whose report its completion has taken."""
    return request.owner.num_scored if request.owner is not None else 0


def may_leave(request: Request, in_flight: bool) -> bool:
    """Whether it may go on with another replica while its own recovers.

    Not when the client has chosen the replica. What was in flight when the worker broke may have broken it, and must
    not break another one: it has to have drawn a token since it was admitted, and it moves but once.
    """
    completion = request.owner
    if completion is None or completion.generation.data_parallel_rank is not None:
        return False
    num_known = len(request.token_ids) - request.num_prompt
    return not in_flight or (len(completion.token_ids) > num_known and completion.moved_at < 0)


def share_prefixes(requests: Sequence[Request], block_size: int) -> None:
    """Let each request wait for an earlier one that has the same longest prefix, so that it is computed once.

    `requests` stand in the order in which they will be admitted.
    """
    first_with: dict[bytes, Request] = {}
    for request in requests:
        hashes = request.block_hashes[: (len(request.token_ids) - 1) // block_size]
        for depth in range(len(hashes), 0, -1):
            if (leader := first_with.get(hashes[depth - 1])) is not None:
                request.leader, request.num_shared_blocks = leader, depth
                break
        for block_hash in hashes:
            first_with.setdefault(block_hash, request)
