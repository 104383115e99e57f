"""Whose turn it is on the CPU: threads that copy give way to those that compute, and to the loop.

In the engine process such a thread shares the interpreter with the loop: preempted while it has it, it keeps the loop
waiting until it runs again, which is later the nicer it is. It has it for a small part of its time, though: what takes
long (the copy, the digest, every system call) lets go of it, and about 0.3 ms of bytecode and calls for each page is
left. Measured with ten runnable threads on two cores, a tick every 2 ms beside two writers that never rest is late by
2.8 ms (p90), 7.8 (p99) and 13.6 (p99.9) at nice 5, by 3.8, 11.3 and 19.5 at nice 0, and by 1.6, 7.6 and 17.7 without
writers. The worst of 7,000 ticks were 110, 32 and 39 ms: what remains of the inversion is rare, and costs less than
writers that take the loop's and the workers' turns.
"""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 5


def lower_priority() -> None:
    """Of the calling thread alone, for good. Does nothing where a container forbids it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
