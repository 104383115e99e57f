"""`--cpu-affinity`: which CPUs the worker of each replica may run on, from its first instruction to its last thread.

    0-3            the worker of the only replica
    0-3|4-7        one list per replica, as vLLM's VLLM_CPU_OMP_THREADS_BIND has them
    0,2,4|1,3,5

A worker that takes over from a dead one gets the same CPUs: what it does to start disturbs no other replica.
"""

from __future__ import annotations

import re
from collections.abc import Collection


def parse_affinity(text: str, num_replicas: int, available: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """The CPUs of each replica, ascending. `available`: those that this process may use.

    Raises ValueError, whose message says what would be accepted.
    """
    lists = text.split("|")
    if len(lists) != num_replicas:
        wanted = "one list of CPUs" if num_replicas == 1 else f"{num_replicas} lists of CPUs with | between them"
        raise ValueError(f"must have {wanted}, one per replica, such as 0-1{'|2-3' * (num_replicas > 1)}; got {text!r}")
    return tuple(_parse_list(part, available) for part in lists)


def _parse_list(text: str, available: Collection[int]) -> tuple[int, ...]:
    cpus: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first:
            raise ValueError(f"{part.strip()!r} is neither a CPU's number nor a range of them, such as 0,2-5")
        cpus |= set(range(first, last + 1))
    if missing := sorted(cpus - set(available)):
        raise ValueError(
            f"CPU {missing[0]} is not among those that this process may use: {', '.join(map(str, sorted(available)))}"
        )
    return tuple(sorted(cpus))
