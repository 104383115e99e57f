"""Whose turn it is on the CPU: threads that copy give way to those that compute, and to the loop."""

from __future__ import annotations

import contextlib
import os
import threading

_NICENESS = 5


def lower_priority() -> None:
    """Of the calling thread alone, for good. Does nothing where a container forbids it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
