"""When the cyclic garbage collector runs: in idle moments, and rarely otherwise.

A full collection looks at every live container; with thousands of open streams that is tens of milliseconds in which
no token is delivered. Almost everything here is freed by reference counts, so the collector can wait until nothing
is in flight. Under load that never ends it still runs, once a lot has piled up, and then on the youngest objects
only.
"""

from __future__ import annotations

import gc

_IDLE_COUNT = 10_000
"""Containers made (and not freed) since the last collection that make one worthwhile when idle."""
_BUSY_COUNT = 300_000


class NullCollector:
    """Leaves the interpreter's own thresholds in charge (engines inside somebody else's process)."""

    def after_step(self, idle: bool) -> None:
        return


class IdleCollector:
    """Takes over from the automatic collector. What is alive now is taken for immortal."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, idle: bool) -> None:
        """Called when a step's work is done and nothing waits for it."""
        count = gc.get_count()[0]
        if idle and count > _IDLE_COUNT:
            gc.collect()
        elif count > _BUSY_COUNT:
            gc.collect(0)
